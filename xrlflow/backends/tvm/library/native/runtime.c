/* Runs regions of kernels as custom operators of ONNX Runtime. Needs a C library, nothing of TVM, no header of ONNX
 * Runtime.
 *
 * ONNX Runtime's C API is a table of functions to which later versions only append: functions are taken by their number.
 * The table is that of version 1.17. */
#include "runtime.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void Status; /* NULL: no error */
typedef struct Api Api;
typedef struct {
  const Api* (*get_api)(uint32_t version);
  const char* (*version)(void);
} ApiBase;

enum { API_VERSION = 17 };
enum {
  CREATE_STATUS = 0,
  CREATE_DOMAIN = 26,
  DOMAIN_ADD = 27,
  ADD_DOMAIN = 28,
  TENSOR_DATA = 51,
  CREATE_SHAPE = 57,
  SET_ELEMENT_TYPE = 58,
  SET_DIMENSIONS = 59,
  ELEMENT_TYPE = 60,
  DIMENSIONS_COUNT = 61,
  DIMENSIONS = 62,
  TENSOR_SHAPE = 65,
  CONTEXT_INPUT = 90,
  CONTEXT_OUTPUT = 91,
  RELEASE_STATUS = 93,
  RELEASE_SHAPE = 99,
  RELEASE_DOMAIN = 101,
  ADD_CONFIG_ENTRY = 130,
  HAS_CONFIG_ENTRY = 237,
  INFER_SET_OUTPUT = 270,
  PARALLEL_FOR = 274,
};
struct Api {
  void* function[275];
};
#define CALL(api, number, type, ...) (((Status * (*)type)(api)->function[number])(__VA_ARGS__))
#define RELEASE(api, number, object) (((void (*)(void*))(api)->function[number])(object))

/* OrtCustomOp of version 17. */
typedef struct Operator {
  uint32_t version;
  void* (*create)(const struct Operator*, const Api*, const void* info);
  const char* (*name)(const struct Operator*);
  const char* (*provider)(const struct Operator*);
  int (*input_type)(const struct Operator*, size_t);
  size_t (*input_count)(const struct Operator*);
  int (*output_type)(const struct Operator*, size_t);
  size_t (*output_count)(const struct Operator*);
  void (*compute)(void*, void*);
  void (*destroy)(void*);
  int (*input_kind)(const struct Operator*, size_t);
  int (*output_kind)(const struct Operator*, size_t);
  int (*memory)(const struct Operator*, size_t);
  int (*variadic_input_least)(const struct Operator*);
  int (*variadic_input_same)(const struct Operator*);
  int (*variadic_output_least)(const struct Operator*);
  int (*variadic_output_same)(const struct Operator*);
  Status* (*create_checked)(const struct Operator*, const Api*, const void* info, void** kernel);
  Status* (*compute_checked)(void*, void*);
  Status* (*infer_shape)(const struct Operator*, void*);
  int (*start_version)(const struct Operator*);
  int (*end_version)(const struct Operator*);
  size_t (*may_inplace)(int**, int**);
  void (*release_may_inplace)(int*, int*);
  size_t (*alias_map)(int**, int**);
  void (*release_alias_map)(int*, int*);
  /* ours */
  const struct region* region;
  const Api* api;
} Operator;

enum { FAIL = 1, INVALID_ARGUMENT = 2 };
enum { ALIGNMENT = 64, TEXT = 1024 };

/* --- Errors of kernels and memory for them */

static __thread char said[TEXT];

/* Append to a text of at most TEXT - 1 bytes. What does not fit is left out, from the end of a character of UTF-8. */
static void append(char* text, const char* part) {
  size_t used = strlen(text), length = strlen(part);
  if (length > TEXT - 1 - used) {
    length = TEXT - 1 - used;
    while (length > 0 && ((unsigned char)part[length] & 0xC0) == 0x80) length--;
  }
  memcpy(text + used, part, length);
  text[used + length] = 0;
}

static void append_number(char* text, int64_t number) {
  char digits[24];
  snprintf(digits, sizeof digits, "%lld", (long long)number);
  append(text, digits);
}

static void say(const char* const* parts, int32_t count) {
  said[0] = 0;
  for (int32_t i = 0; i < count; i++) append(said, parts[i] ? parts[i] : "");
}

static void set_error(const char* kind, const char* const* parts, int32_t count) {
  (void)kind;
  say(parts, count);
}

/* Kernels call these by name, or through pointers that are weak in their object. */
__attribute__((visibility("hidden"))) void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char* const* parts,
                                                                              int32_t count) {
  set_error(kind, parts, count);
}

__attribute__((visibility("hidden"))) void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) {
  set_error(kind, &text, 1);
}

static void* aligned(uint64_t bytes) {
  void* memory = NULL;
  return posix_memalign(&memory, ALIGNMENT, bytes ? bytes : 1) == 0 ? memory : NULL;
}

static void* take_workspace(int device_type, int device_id, uint64_t bytes, int code, int bits) {
  (void)device_type, (void)device_id, (void)code, (void)bits;
  return aligned(bytes);
}

static int free_workspace(int device_type, int device_id, void* memory) {
  (void)device_type, (void)device_id;
  free(memory);
  return 0;
}

/* --- Parallel loops, on the threads of the session */

typedef struct {
  void* sync_handle;
  int32_t num_task;
} Group;
typedef int (*Task)(int task, Group* group, void* data);

struct running {
  const Api* api;
  void* context;
};
/* The call of the session that this thread runs kernels for; NULL in threads that run a part of a loop. */
static __thread struct running* running;

struct loop {
  Task task;
  void* data;
  int32_t tasks;
  int failed; /* set once, read after the loop */
  char said[TEXT];
};

static void run_task(void* given, size_t index) {
  struct loop* loop = given;
  Group group = {NULL, loop->tasks};
  struct running* outer = running;
  running = NULL;
  said[0] = 0;
  if (loop->task((int)index, &group, loop->data) != 0) {
    int expected = 0;
    if (__atomic_compare_exchange_n(&loop->failed, &expected, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      memcpy(loop->said, said, TEXT);
    }
  }
  running = outer;
}

static int launch(Task task, void* data, int count) {
  struct loop loop = {task, data, count > 0 ? count : xrlflow_tasks, 0, {0}};
  if (running == NULL) {
    loop.tasks = 1;
    run_task(&loop, 0);
  } else {
    Status* status = CALL(running->api, PARALLEL_FOR, (void*, void (*)(void*, size_t), size_t, size_t, void*),
                          running->context, run_task, (size_t)loop.tasks, 0, &loop);
    if (status != NULL) {
      RELEASE(running->api, RELEASE_STATUS, status);
      static const char* const text[] = {"ONNX Runtime could not run a parallel loop"};
      say(text, 1);
      return -1;
    }
  }
  if (__atomic_load_n(&loop.failed, __ATOMIC_ACQUIRE)) {
    memcpy(said, loop.said, TEXT);
    return -1;
  }
  return 0;
}

int (*__TVMBackendParallelLaunch)(Task, void*, int) = launch;
void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = take_workspace;
int (*__TVMBackendFreeWorkspace)(int, int, void*) = free_workspace;
void (*__TVMFFIErrorSetRaisedFromCStrParts)(const char*, const char* const*, int32_t) = set_error;

/* --- Kernels of one region */

/* Memory and prepared arguments for one call at a time. Calls that run at once have one each. */
struct instance {
  struct instance* next;
  unsigned char* arena;
  DLTensor* tensor;
  Any* arguments;
};

struct kernel {
  const struct region* region;
  const Api* api;
  pthread_mutex_t lock;
  struct instance* idle;
};

int xrlflow_copy(void* self, const Any* arguments, int32_t count, Any* result) {
  (void)self, (void)count, (void)result;
  const DLTensor *from = arguments[0].v_ptr, *to = arguments[1].v_ptr;
  uint64_t bytes = (from->bits + 7u) / 8u;
  for (int32_t i = 0; i < from->ndim; i++) bytes *= (uint64_t)from->shape[i];
  if (bytes) memcpy(to->data, from->data, bytes);
  return 0;
}

static void free_instance(struct instance* instance) {
  if (instance == NULL) return;
  free(instance->arena);
  free(instance->tensor);
  free(instance->arguments);
  free(instance);
}

static struct instance* new_instance(const struct region* region) {
  size_t arguments = 0;
  for (int32_t i = 0; i < region->steps; i++) arguments += (size_t)region->step[i].count;
  struct instance* made = calloc(1, sizeof *made);
  if (made == NULL) return NULL;
  made->arena = aligned(region->arena);
  made->tensor = calloc((size_t)region->tensors + 1, sizeof *made->tensor);
  made->arguments = calloc(arguments + 1, sizeof *made->arguments);
  if (made->arena == NULL || made->tensor == NULL || made->arguments == NULL) {
    free_instance(made);
    return NULL;
  }
  for (int32_t i = 0; i < region->tensors; i++) {
    const struct tensor* said = &region->tensor[i];
    DLTensor* tensor = &made->tensor[i];
    tensor->device_type = 1; /* a processor */
    tensor->ndim = said->ndim, tensor->shape = said->shape;
    tensor->code = said->code, tensor->bits = said->bits, tensor->lanes = 1;
    if (said->place == ARENA) tensor->data = made->arena + said->offset;
    if (said->place == CONSTANT) tensor->data = (void*)(uintptr_t)(xrlflow_constants + said->offset);
  }
  Any* argument = made->arguments;
  for (int32_t i = 0; i < region->steps; i++) {
    const struct step* step = &region->step[i];
    for (int32_t j = 0; j < step->count; j++, argument++) {
      int32_t given = step->arguments[j];
      argument->type_index = given < 0 ? ANY_INT : ANY_TENSOR;
      if (given < 0) argument->v_int64 = region->integers[-1 - given];
      else argument->v_ptr = &made->tensor[given];
    }
  }
  return made;
}

static struct instance* take_instance(struct kernel* kernel) {
  pthread_mutex_lock(&kernel->lock);
  struct instance* found = kernel->idle;
  if (found != NULL) kernel->idle = found->next;
  pthread_mutex_unlock(&kernel->lock);
  return found != NULL ? found : new_instance(kernel->region);
}

static void give_instance(struct kernel* kernel, struct instance* instance) {
  pthread_mutex_lock(&kernel->lock);
  instance->next = kernel->idle;
  kernel->idle = instance;
  pthread_mutex_unlock(&kernel->lock);
}

static Status* error(const Api* api, int code, const char* text) {
  return CALL(api, CREATE_STATUS, (int, const char*), code, text);
}

/* NULL if `value`, input `index` of a region, has the element type and the sizes that kernels were compiled for. */
static Status* check_input(const struct kernel* kernel, int32_t index, const void* value) {
  const Api* api = kernel->api;
  const struct port* port = &kernel->region->input[index];
  const struct tensor* wanted = &kernel->region->tensor[port->tensor];
  void* shape = NULL;
  size_t count = 0;
  int type = 0;
  int64_t sizes[MOST_DIMENSIONS] = {0};
  Status* status = CALL(api, TENSOR_SHAPE, (const void*, void**), value, &shape);
  if (status != NULL) return status;
  status = CALL(api, ELEMENT_TYPE, (const void*, int*), shape, &type);
  if (status == NULL) status = CALL(api, DIMENSIONS_COUNT, (const void*, size_t*), shape, &count);
  if (status == NULL && count > 0 && count <= MOST_DIMENSIONS) {
    status = CALL(api, DIMENSIONS, (const void*, int64_t*, size_t), shape, sizes, count);
  }
  RELEASE(api, RELEASE_SHAPE, shape);
  if (status != NULL) return status;
  int same = type == port->type && count == (size_t)wanted->ndim;
  for (int32_t i = 0; same && i < wanted->ndim; i++) same = sizes[i] == wanted->shape[i];
  if (same) return NULL;
  char text[TEXT] = "";
  append(text, kernel->region->name);
  append(text, ": input ");
  append(text, port->name);
  append(text, " is not of the type and the sizes [");
  for (int32_t i = 0; i < wanted->ndim; i++) {
    if (i) append(text, ", ");
    append_number(text, wanted->shape[i]);
  }
  append(text, "] that its kernels were compiled for");
  return error(api, INVALID_ARGUMENT, text);
}

/* Point the tensors of inputs and outputs to the memory of this call. */
static Status* bind(const struct kernel* kernel, struct instance* instance, void* context) {
  const Api* api = kernel->api;
  const struct region* region = kernel->region;
  for (int32_t i = 0; i < region->inputs; i++) {
    void *value = NULL, *data = NULL;
    Status* status = CALL(api, CONTEXT_INPUT, (void*, size_t, void**), context, (size_t)i, &value);
    if (status == NULL && value == NULL) status = error(api, INVALID_ARGUMENT, "an input is missing");
    if (status == NULL) status = check_input(kernel, i, value);
    if (status == NULL) status = CALL(api, TENSOR_DATA, (void*, void**), value, &data);
    if (status != NULL) return status;
    instance->tensor[region->input[i].tensor].data = data;
  }
  for (int32_t i = 0; i < region->outputs; i++) {
    void *value = NULL, *data = NULL;
    const struct tensor* tensor = &region->tensor[region->output[i].tensor];
    Status* status = CALL(api, CONTEXT_OUTPUT, (void*, size_t, const int64_t*, size_t, void**), context, (size_t)i,
                          tensor->shape, (size_t)tensor->ndim, &value);
    if (status == NULL && value == NULL) status = error(api, INVALID_ARGUMENT, "an output is missing");
    if (status == NULL) status = CALL(api, TENSOR_DATA, (void*, void**), value, &data);
    if (status != NULL) return status;
    instance->tensor[region->output[i].tensor].data = data;
  }
  /* views of inputs and outputs */
  for (int32_t i = 0; i < region->tensors; i++) {
    const struct tensor* tensor = &region->tensor[i];
    if (tensor->place == INPUT) {
      instance->tensor[i].data = instance->tensor[region->input[tensor->offset].tensor].data;
    } else if (tensor->place == OUTPUT) {
      instance->tensor[i].data = instance->tensor[region->output[tensor->offset].tensor].data;
    }
  }
  return NULL;
}

static Status* check_indices(const struct kernel* kernel, const struct instance* instance) {
  const struct region* region = kernel->region;
  if (region->checked < 0) return NULL;
  const int64_t* ends = instance->tensor[region->checked].data;
  for (int32_t i = 0; i < region->checks; i++) {
    const struct check* check = &region->check[i];
    int64_t least = ends[2 * i], greatest = ends[2 * i + 1];
    if (check->low <= least && greatest <= check->high) continue;
    char text[TEXT] = "";
    append(text, check->before);
    if (check->after != NULL) {
      append_number(text, least < check->low ? least : greatest);
      append(text, check->after);
    }
    return error(kernel->api, INVALID_ARGUMENT, text);
  }
  return NULL;
}

#ifdef XRLFLOW_PROFILE
#include <time.h>
/* Nanoseconds of the last call of each step, region after region. Calls at the same time overwrite each other's. */
__attribute__((visibility("default"))) int64_t xrlflow_spent[XRLFLOW_PROFILE];

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t* spent_by(const struct region* region) {
  int64_t* found = xrlflow_spent;
  for (const struct region* other = xrlflow_region; other != region; other++) found += other->steps;
  return found;
}
#endif

static Status* run(struct kernel* kernel, struct instance* instance, void* context) {
  const struct region* region = kernel->region;
  Status* status = bind(kernel, instance, context);
  if (status != NULL) return status;
  struct running here = {kernel->api, context};
  struct running* outer = running;
  const Any* arguments = instance->arguments;
  int failed = 0;
  running = &here;
  for (int32_t i = 0; i < region->steps && !failed; i++) {
    const struct step* step = &region->step[i];
    Any result = {ANY_NONE, 0, {0}};
    said[0] = 0;
#ifdef XRLFLOW_PROFILE
    int64_t begun = now();
#endif
    failed = step->kernel(NULL, arguments, step->count, &result) != 0;
#ifdef XRLFLOW_PROFILE
    spent_by(region)[i] = now() - begun;
#endif
    arguments += step->count;
  }
  running = outer;
  if (failed) {
    char text[TEXT] = "";
    append(text, region->name);
    append(text, ": ");
    append(text, said[0] ? said : "a kernel failed");
    return error(kernel->api, FAIL, text);
  }
  return check_indices(kernel, instance);
}

/* --- What ONNX Runtime calls */

static Status* compute_checked(void* given, void* context) {
  struct kernel* kernel = given;
  struct instance* instance = take_instance(kernel);
  if (instance == NULL) return error(kernel->api, FAIL, "no memory for a region of kernels");
  Status* status = run(kernel, instance, context);
  give_instance(kernel, instance);
  return status;
}

static void compute(void* given, void* context) {
  struct kernel* kernel = given;
  Status* status = compute_checked(given, context);
  if (status != NULL) RELEASE(kernel->api, RELEASE_STATUS, status);
}

static Status* create_checked(const Operator* op, const Api* api, const void* info, void** made) {
  (void)info;
  struct kernel* kernel = calloc(1, sizeof *kernel);
  *made = kernel;
  if (kernel == NULL) return error(api, FAIL, "no memory for a region of kernels");
  kernel->region = op->region;
  kernel->api = api;
  pthread_mutex_init(&kernel->lock, NULL);
  return NULL;
}

static void* create(const Operator* op, const Api* api, const void* info) {
  void* made = NULL;
  Status* status = create_checked(op, api, info, &made);
  if (status != NULL) RELEASE(api, RELEASE_STATUS, status);
  return made;
}

static void destroy(void* given) {
  struct kernel* kernel = given;
  if (kernel == NULL) return;
  while (kernel->idle != NULL) {
    struct instance* next = kernel->idle->next;
    free_instance(kernel->idle);
    kernel->idle = next;
  }
  pthread_mutex_destroy(&kernel->lock);
  free(kernel);
}

static Status* infer_shape(const Operator* op, void* context) {
  const Api* api = op->api;
  for (int32_t i = 0; i < op->region->outputs; i++) {
    const struct port* port = &op->region->output[i];
    const struct tensor* tensor = &op->region->tensor[port->tensor];
    void* shape = NULL;
    Status* status = CALL(api, CREATE_SHAPE, (void**), &shape);
    if (status != NULL) return status;
    status = CALL(api, SET_ELEMENT_TYPE, (void*, int), shape, port->type);
    if (status == NULL) {
      status = CALL(api, SET_DIMENSIONS, (void*, const int64_t*, size_t), shape, tensor->shape, (size_t)tensor->ndim);
    }
    if (status == NULL) status = CALL(api, INFER_SET_OUTPUT, (void*, size_t, void*), context, (size_t)i, shape);
    RELEASE(api, RELEASE_SHAPE, shape);
    if (status != NULL) return status;
  }
  return NULL;
}

static const char* name_of(const Operator* op) { return op->region->name; }
static const char* provider(const Operator* op) { return (void)op, NULL; }
static int input_type(const Operator* op, size_t i) { return op->region->input[i].type; }
static int output_type(const Operator* op, size_t i) { return op->region->output[i].type; }
static size_t input_count(const Operator* op) { return (size_t)(op->region->inputs + op->region->weights); }
static size_t output_count(const Operator* op) { return (size_t)op->region->outputs; }
static int required(const Operator* op, size_t i) { return (void)op, (void)i, 0; }
static int one(const Operator* op) { return (void)op, 1; }
static int latest(const Operator* op) { return (void)op, INT32_MAX; }
static size_t none(int** a, int** b) { return *a = NULL, *b = NULL, (size_t)0; }
static void release_none(int* a, int* b) { (void)a, (void)b; }

static const Operator OPERATOR = {
    .version = API_VERSION,
    .create = create,
    .name = name_of,
    .provider = provider,
    .input_type = input_type,
    .input_count = input_count,
    .output_type = output_type,
    .output_count = output_count,
    .compute = compute,
    .destroy = destroy,
    .input_kind = required,
    .output_kind = required,
    .memory = required,
    .variadic_input_least = one,
    .variadic_input_same = one,
    .variadic_output_least = one,
    .variadic_output_same = one,
    .create_checked = create_checked,
    .compute_checked = compute_checked,
    .infer_shape = infer_shape,
    .start_version = one,
    .end_version = latest,
    .may_inplace = none,
    .release_may_inplace = release_none,
    .alias_map = none,
    .release_alias_map = release_none,
};

/* One for each ONNX Runtime in the process, for all of its sessions. Never released: sessions may outlive options. */
struct domain {
  struct domain* next;
  const Api* api;
  void* made;
};
static pthread_mutex_t registering = PTHREAD_MUTEX_INITIALIZER;
static struct domain* domains;
static int told;

static void tell(const char* why) {
  if (!told && getenv("XRLFLOW_VERBOSE") != NULL) {
    fprintf(stderr, "%s: %s: the model runs without its kernels\n", xrlflow_domain, why);
  }
  told = 1;
}

static Status* make_domain(const Api* api, struct domain** made) {
  struct domain* domain = calloc(1, sizeof *domain);
  Operator* operators = calloc((size_t)xrlflow_regions, sizeof *operators);
  Status* status = NULL;
  if (domain == NULL || operators == NULL) status = error(api, FAIL, "no memory for a library of kernels");
  if (status == NULL) status = CALL(api, CREATE_DOMAIN, (const char*, void**), xrlflow_domain, &domain->made);
  for (int32_t i = 0; status == NULL && i < xrlflow_regions; i++) {
    operators[i] = OPERATOR;
    operators[i].region = &xrlflow_region[i];
    operators[i].api = api;
    status = CALL(api, DOMAIN_ADD, (void*, const Operator*), domain->made, &operators[i]);
  }
  if (status != NULL) {
    if (domain != NULL && domain->made != NULL) RELEASE(api, RELEASE_DOMAIN, domain->made);
    free(domain);
    free(operators);
    return status;
  }
  domain->api = api;
  domain->next = domains;
  *made = domains = domain;
  return NULL;
}

/* Add the domain to a session's options, once: a second domain of one name would be an error. */
static Status* add_domain(const Api* api, void* options) {
  int known = 0;
  struct domain* domain = domains;
  Status* status = CALL(api, HAS_CONFIG_ENTRY, (const void*, const char*, int*), options, xrlflow_domain, &known);
  if (status != NULL || known) return status;
  while (domain != NULL && domain->api != api) domain = domain->next;
  if (domain == NULL) status = make_domain(api, &domain);
  if (status == NULL) status = CALL(api, ADD_DOMAIN, (void*, void*), options, domain->made);
  if (status != NULL) return status;
  return CALL(api, ADD_CONFIG_ENTRY, (void*, const char*, const char*), options, xrlflow_domain, "1");
}

/* An older one would print an error if it were asked for this version. */
static const Api* api_of(const ApiBase* base) {
  unsigned major = 0, minor = 0;
  if (sscanf(base->version(), "%u.%u", &major, &minor) != 2 || (major <= 1 && minor < API_VERSION)) return NULL;
  return base->get_api(API_VERSION);
}

/* The entry point of a library of custom operators. Adds nothing where the kernels cannot run: then ONNX Runtime runs
 * the bodies of the model's functions. */
__attribute__((visibility("default"))) Status* RegisterCustomOps(void* options, const ApiBase* base);

Status* RegisterCustomOps(void* options, const ApiBase* base) {
  const Api* api = api_of(base);
  Status* status = NULL;
  pthread_mutex_lock(&registering);
  if (api == NULL) {
    tell("ONNX Runtime is older than 1.17");
  } else if (!xrlflow_runs_here()) {
    tell("the kernels are for another processor");
  } else {
    status = add_domain(api, options);
  }
  pthread_mutex_unlock(&registering);
  return status;
}
