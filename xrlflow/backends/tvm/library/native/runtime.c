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
  SYMBOLIC_DIMENSIONS = 63,
  TENSOR_SHAPE = 65,
  CONTEXT_INPUT = 90,
  CONTEXT_OUTPUT = 91,
  RELEASE_STATUS = 93,
  RELEASE_SHAPE = 99,
  RELEASE_DOMAIN = 101,
  ADD_CONFIG_ENTRY = 130,
  HAS_CONFIG_ENTRY = 237,
  INFER_INPUT = 268,
  INFER_SET_OUTPUT = 270,
  SET_SYMBOLIC_DIMENSIONS = 271,
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

/* Memory and prepared arguments of a plan. */
struct prepared {
  const struct plan* plan;
  unsigned char* arena;
  unsigned char* padded; /* a block of all inputs and outputs, for fewer rows than a block has; NULL until needed */
  DLTensor* tensor;
  Any* arguments;
};

/* What one call at a time needs: calls that run at once have one each. Plans are prepared when they are needed. */
struct instance {
  struct instance* next;
  struct prepared* prepared;
  unsigned char **input, **output;   /* the memory of the inputs and outputs of the call */
  int64_t (*sizes)[MOST_DIMENSIONS]; /* of its inputs */
  int64_t rows;                      /* of a region for any number of rows */
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

static void free_instance(struct instance* instance, int32_t plans) {
  if (instance == NULL) return;
  for (int32_t i = 0; instance->prepared != NULL && i < plans; i++) {
    free(instance->prepared[i].arena);
    free(instance->prepared[i].padded);
    free(instance->prepared[i].tensor);
    free(instance->prepared[i].arguments);
  }
  free(instance->prepared);
  free(instance->input);
  free(instance->output);
  free(instance->sizes);
  free(instance);
}

static struct instance* new_instance(const struct region* region) {
  struct instance* made = calloc(1, sizeof *made);
  if (made == NULL) return NULL;
  made->prepared = calloc((size_t)region->plans, sizeof *made->prepared);
  made->input = calloc((size_t)region->inputs + 1, sizeof *made->input);
  made->output = calloc((size_t)region->outputs + 1, sizeof *made->output);
  made->sizes = calloc((size_t)region->inputs + 1, sizeof *made->sizes);
  if (made->prepared && made->input && made->output && made->sizes) return made;
  free_instance(made, region->plans);
  return NULL;
}

/* Whether there is memory for a plan. */
static int prepare(struct prepared* made, const struct plan* plan) {
  if (made->plan != NULL) return 1;
  size_t arguments = 0;
  for (int32_t i = 0; i < plan->steps; i++) arguments += (size_t)plan->step[i].count;
  if (made->arena == NULL) made->arena = aligned(plan->arena);
  if (made->tensor == NULL) made->tensor = calloc((size_t)plan->tensors + 1, sizeof *made->tensor);
  if (made->arguments == NULL) made->arguments = calloc(arguments + 1, sizeof *made->arguments);
  if (made->arena == NULL || made->tensor == NULL || made->arguments == NULL) return 0;
  for (int32_t i = 0; i < plan->tensors; i++) {
    const struct tensor* said = &plan->tensor[i];
    DLTensor* tensor = &made->tensor[i];
    tensor->device_type = 1; /* a processor */
    tensor->ndim = said->ndim, tensor->shape = said->shape;
    tensor->code = said->code, tensor->bits = said->bits, tensor->lanes = 1;
    if (said->place == ARENA) tensor->data = made->arena + said->offset;
    if (said->place == CONSTANT) tensor->data = (void*)(uintptr_t)(xrlflow_constants + said->offset);
  }
  Any* argument = made->arguments;
  for (int32_t i = 0; i < plan->steps; i++) {
    const struct step* step = &plan->step[i];
    for (int32_t j = 0; j < step->count; j++, argument++) {
      int32_t given = step->arguments[j];
      argument->type_index = given < 0 ? ANY_INT : ANY_TENSOR;
      if (given < 0) argument->v_int64 = plan->integers[-1 - given];
      else argument->v_ptr = &made->tensor[given];
    }
  }
  made->plan = plan;
  return 1;
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

static Status* wrong_sizes(const struct kernel* kernel, const struct port* port) {
  char text[TEXT] = "";
  append(text, kernel->region->name);
  append(text, ": input ");
  append(text, port->name);
  append(text, " is not of the type and the sizes [");
  for (int32_t i = 0; i < port->ndim; i++) {
    if (i) append(text, ", ");
    if (i < port->open) append(text, "?");
    else append_number(text, port->shape[i]);
  }
  append(text, "] that its kernels were compiled for");
  if (port->open) append(text, ", or not of those that the model declares to be equal");
  return error(kernel->api, INVALID_ARGUMENT, text);
}

/* Read the sizes of input `index`. NULL if they and the element type are those that kernels were compiled for. */
static Status* check_input(const struct kernel* kernel, int32_t index, const void* value, struct instance* call) {
  const Api* api = kernel->api;
  const struct port* port = &kernel->region->input[index];
  int64_t* sizes = call->sizes[index];
  void* shape = NULL;
  size_t count = 0;
  int type = 0;
  Status* status = CALL(api, TENSOR_SHAPE, (const void*, void**), value, &shape);
  if (status != NULL) return status;
  status = CALL(api, ELEMENT_TYPE, (const void*, int*), shape, &type);
  if (status == NULL) status = CALL(api, DIMENSIONS_COUNT, (const void*, size_t*), shape, &count);
  if (status == NULL && count > 0 && count <= MOST_DIMENSIONS) {
    status = CALL(api, DIMENSIONS, (const void*, int64_t*, size_t), shape, sizes, count);
  }
  RELEASE(api, RELEASE_SHAPE, shape);
  if (status != NULL) return status;
  int same = type == port->type && count == (size_t)port->ndim;
  int64_t rows = 1;
  for (int32_t i = 0; same && i < port->open; i++) {
    rows *= sizes[i];
    same = sizes[i] == call->sizes[port->like][i];
  }
  for (int32_t i = port->open; same && i < port->ndim; i++) same = sizes[i] == port->shape[i];
  if (index == 0) call->rows = rows;
  if (port->open) same = same && rows == call->rows;
  return same ? NULL : wrong_sizes(kernel, port);
}

/* Find the memory of this call's inputs and outputs. */
static Status* bind(const struct kernel* kernel, void* context, struct instance* call) {
  const Api* api = kernel->api;
  const struct region* region = kernel->region;
  for (int32_t i = 0; i < region->inputs; i++) {
    void* value = NULL;
    Status* status = CALL(api, CONTEXT_INPUT, (void*, size_t, void**), context, (size_t)i, &value);
    if (status == NULL && value == NULL) status = error(api, INVALID_ARGUMENT, "an input is missing");
    if (status == NULL) status = check_input(kernel, i, value, call);
    if (status == NULL) status = CALL(api, TENSOR_DATA, (void*, void**), value, (void**)&call->input[i]);
    if (status != NULL) return status;
  }
  for (int32_t i = 0; i < region->outputs; i++) {
    void* value = NULL;
    const struct port* port = &region->output[i];
    int64_t sizes[MOST_DIMENSIONS];
    for (int32_t d = 0; d < port->ndim; d++) {
      if (d >= port->open) sizes[d] = port->shape[d];
      else if (port->like >= 0) sizes[d] = call->sizes[port->like][d];
      else sizes[d] = d == port->open - 1 ? call->rows : 1;
    }
    Status* status = CALL(api, CONTEXT_OUTPUT, (void*, size_t, const int64_t*, size_t, void**), context, (size_t)i,
                          sizes, (size_t)port->ndim, &value);
    if (status == NULL && value == NULL) status = error(api, INVALID_ARGUMENT, "an output is missing");
    if (status == NULL) status = CALL(api, TENSOR_DATA, (void*, void**), value, (void**)&call->output[i]);
    if (status != NULL) return status;
  }
  return NULL;
}

static Status* check_indices(const struct kernel* kernel, const struct prepared* prepared) {
  const struct plan* plan = prepared->plan;
  if (plan->checked < 0) return NULL;
  const int64_t* ends = prepared->tensor[plan->checked].data;
  for (int32_t i = 0; i < plan->checks; i++) {
    const struct check* check = &plan->check[i];
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

static int64_t* spent_by(const struct plan* plan) {
  int64_t* found = xrlflow_spent;
  for (const struct region* region = xrlflow_region;; region++) {
    for (int32_t i = 0; i < region->plans; i++) {
      if (&region->plan[i] == plan) return found;
      found += region->plan[i].steps;
    }
  }
}
#endif

/* Run a plan on the memory that the tensors of its inputs and outputs point to. */
static Status* run_plan(const struct kernel* kernel, struct prepared* prepared, void* context) {
  const struct plan* plan = prepared->plan;
  /* views of inputs and outputs */
  for (int32_t i = 0; i < plan->tensors; i++) {
    const struct tensor* tensor = &plan->tensor[i];
    if (tensor->place == INPUT) prepared->tensor[i].data = prepared->tensor[plan->input[tensor->offset]].data;
    if (tensor->place == OUTPUT) prepared->tensor[i].data = prepared->tensor[plan->output[tensor->offset]].data;
  }
  struct running here = {kernel->api, context};
  struct running* outer = running;
  const Any* arguments = prepared->arguments;
  int failed = 0;
  running = &here;
  for (int32_t i = 0; i < plan->steps && !failed; i++) {
    const struct step* step = &plan->step[i];
    Any result = {ANY_NONE, 0, {0}};
    said[0] = 0;
#ifdef XRLFLOW_PROFILE
    int64_t begun = now();
#endif
    failed = step->kernel(NULL, arguments, step->count, &result) != 0;
#ifdef XRLFLOW_PROFILE
    spent_by(plan)[i] = now() - begun;
#endif
    arguments += step->count;
  }
  running = outer;
  if (failed) {
    char text[TEXT] = "";
    append(text, kernel->region->name);
    append(text, ": ");
    append(text, said[0] ? said : "a kernel failed");
    return error(kernel->api, FAIL, text);
  }
  return check_indices(kernel, prepared);
}

static Status* no_memory(const struct kernel* kernel) {
  return error(kernel->api, FAIL, "no memory for a region of kernels");
}

/* Run a plan on a block of rows, from `first` on. If there are fewer than it has, the last one is repeated: its values
 * are valid, which zeros may not be. */
static Status* run_block(const struct kernel* kernel, struct prepared* prepared, const struct instance* call,
                         void* context, int64_t first) {
  const struct region* region = kernel->region;
  const struct plan* plan = prepared->plan;
  uint64_t there = (uint64_t)(call->rows - first), block = (uint64_t)plan->rows;
  int pads = there < block;
  if (pads && prepared->padded == NULL) {
    uint64_t bytes = 0;
    for (int32_t i = 0; i < region->inputs; i++) bytes += region->input[i].bytes * block + ALIGNMENT;
    for (int32_t i = 0; i < region->outputs; i++) bytes += region->output[i].bytes * block + ALIGNMENT;
    prepared->padded = aligned(bytes);
    if (prepared->padded == NULL) return no_memory(kernel);
  }
  unsigned char* padded = prepared->padded;
  for (int32_t i = 0; i < region->inputs; i++) {
    uint64_t bytes = region->input[i].bytes;
    unsigned char* data = call->input[i] + (uint64_t)first * bytes;
    if (pads && bytes) {
      memcpy(padded, data, there * bytes);
      for (uint64_t row = there; row < block; row++) {
        memcpy(padded + row * bytes, data + (there - 1) * bytes, bytes);
      }
      data = padded;
      padded += (bytes * block + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    prepared->tensor[plan->input[i]].data = data;
  }
  unsigned char* results = padded;
  for (int32_t i = 0; i < region->outputs; i++) {
    uint64_t bytes = region->output[i].bytes;
    prepared->tensor[plan->output[i]].data = pads ? padded : call->output[i] + (uint64_t)first * bytes;
    if (pads) padded += (bytes * block + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  Status* status = run_plan(kernel, prepared, context);
  for (int32_t i = 0; pads && status == NULL && i < region->outputs; i++) {
    uint64_t bytes = region->output[i].bytes;
    memcpy(call->output[i] + (uint64_t)first * bytes, results, there * bytes);
    results += (bytes * block + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  return status;
}

/* The relative time of a block, as measured with T5: reading all weights takes as long as multiplying with them LEAST
 * times, and a part of the work for each row is no multiplication. */
enum { LEAST = 11 };

static int64_t time_of(int64_t block) { return 16 * (block > LEAST ? block : LEAST) + 5 * block + 20; }

/* The least time for this many rows by plan `first` and those for fewer rows. `blocks`: how many of `first`. */
static int64_t divide(const struct region* region, int32_t first, int64_t rows, int64_t* blocks) {
  int64_t block = region->plan[first].rows, other = 0;
  *blocks = (rows + block - 1) / block;
  int64_t all = *blocks * time_of(block);
  if (first + 1 == region->plans || rows % block == 0) return all;
  int64_t some = rows / block * time_of(block) + divide(region, first + 1, rows % block, &other);
  if (all <= some) return all;
  *blocks = rows / block;
  return some;
}

static Status* run(struct kernel* kernel, struct instance* call, void* context) {
  const struct region* region = kernel->region;
  Status* status = bind(kernel, context, call);
  int64_t done = 0;
  for (int32_t i = 0; status == NULL && i < region->plans && (region->plan[i].rows == 0 || done < call->rows); i++) {
    const struct plan* plan = &region->plan[i];
    int64_t blocks = 1;
    if (plan->rows) divide(region, i, call->rows - done, &blocks);
    if (blocks && !prepare(&call->prepared[i], plan)) return no_memory(kernel);
    for (; status == NULL && blocks > 0; blocks--) {
      int64_t first = done;
      /* The last block may overlap the one before, and computes its rows again. */
      if (first + plan->rows > call->rows) first = call->rows > plan->rows ? call->rows - plan->rows : 0;
      status = run_block(kernel, &call->prepared[i], call, context, first);
      done = first + plan->rows;
    }
  }
  return status;
}

/* --- What ONNX Runtime calls */

static Status* compute_checked(void* given, void* context) {
  struct kernel* kernel = given;
  struct instance* instance = take_instance(kernel);
  if (instance == NULL) return no_memory(kernel);
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
    free_instance(kernel->idle, kernel->region->plans);
    kernel->idle = next;
  }
  pthread_mutex_destroy(&kernel->lock);
  free(kernel);
}

/* The row dimensions of an output, as ONNX Runtime knows them of input `like`: numbers (-1: open) and names. NULL and no
 * error if it knows nothing. */
static Status* infer_rows(const Operator* op, void* context, const struct port* port, int64_t* sizes,
                          const char** names, int* known) {
  const Api* api = op->api;
  void* shape = NULL;
  size_t count = 0;
  *known = 0;
  if (port->like < 0) return NULL;
  Status* status = CALL(api, INFER_INPUT, (const void*, size_t, void**), context, (size_t)port->like, &shape);
  if (status == NULL) status = CALL(api, DIMENSIONS_COUNT, (const void*, size_t*), shape, &count);
  if (status != NULL || count != (size_t)op->region->input[port->like].ndim || count > MOST_DIMENSIONS) return status;
  status = CALL(api, DIMENSIONS, (const void*, int64_t*, size_t), shape, sizes, count);
  if (status == NULL) status = CALL(api, SYMBOLIC_DIMENSIONS, (const void*, const char**, size_t), shape, names, count);
  *known = status == NULL;
  for (int32_t i = 0; i < port->open; i++) {
    if (sizes[i] < 0 && (names[i] == NULL || !names[i][0])) *known = 0;
  }
  return status;
}

static Status* infer_shape(const Operator* op, void* context) {
  const Api* api = op->api;
  for (int32_t i = 0; i < op->region->outputs; i++) {
    const struct port* port = &op->region->output[i];
    int64_t sizes[MOST_DIMENSIONS];
    const char* names[MOST_DIMENSIONS];
    if (port->open) {
      int known = 0;
      Status* status = infer_rows(op, context, port, sizes, names, &known);
      if (status != NULL) return status;
      if (!known) continue;
    }
    for (int32_t d = port->open; d < port->ndim; d++) sizes[d] = port->shape[d], names[d] = "";
    void* shape = NULL;
    Status* status = CALL(api, CREATE_SHAPE, (void**), &shape);
    if (status != NULL) return status;
    status = CALL(api, SET_ELEMENT_TYPE, (void*, int), shape, port->type);
    if (status == NULL) {
      status = CALL(api, SET_DIMENSIONS, (void*, const int64_t*, size_t), shape, sizes, (size_t)port->ndim);
    }
    if (status == NULL && port->open) {
      status = CALL(api, SET_SYMBOLIC_DIMENSIONS, (void*, const char**, size_t), shape, names, (size_t)port->ndim);
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
