/* A small host for libraries of kernels: as much of ONNX Runtime's C API as they call, with its functions at the same
 * numbers. Where it is compiled with a sanitizer or runs under valgrind or in an emulator, so do the kernels.
 *
 *     host LIBRARY CALLS RESULTS THREADS
 *
 * It is version HOST_VERSION of ONNX Runtime (an environment variable), else 1.17.0.
 *
 * CALLS and RESULTS consist of numbers of 8 bytes, and of bytes after their count, filled up to a multiple of 8:
 *   CALLS: the number of calls; for each the operator, the number of inputs; for each input its type, the number of
 *          dimensions, dimensions, and the elements.
 *   RESULTS: the number of operators; for each call the text of its error (no bytes: none), and without an error the
 *          number of outputs, and for each its elements.
 * All calls are made in THREADS threads at once, twice; all must give the same results. Elements of inputs and outputs
 * begin 4 bytes after a multiple of 64, and their memory ends with them. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64, OFFSET = 4 };

typedef struct {
  char text[2048];
} Status;
typedef struct {
  int type;
  size_t count;
  int64_t size[MOST];
} Shape;
typedef struct {
  Shape shape;
  size_t bytes;
  unsigned char* block; /* the elements begin at OFFSET */
} Value;
typedef struct Operator Operator;
typedef struct {
  const Operator* operator;
  size_t inputs, outputs;
  Value* input;
  Value* output;
} Context;
typedef struct {
  void* function[275];
} Api;
typedef struct {
  const Api* (*get_api)(uint32_t version);
  const char* (*version)(void);
} ApiBase;
struct Operator {
  uint32_t version;
  void* (*create)(const Operator*, const Api*, const void*);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  int (*input_type)(const Operator*, size_t);
  size_t (*input_count)(const Operator*);
  int (*output_type)(const Operator*, size_t);
  size_t (*output_count)(const Operator*);
  void (*compute)(void*, void*);
  void (*destroy)(void*);
  void* unused[7];
  Status* (*create_checked)(const Operator*, const Api*, const void*, void**);
  Status* (*compute_checked)(void*, void*);
  Status* (*infer_shape)(const Operator*, void*);
};
typedef struct {
  char name[128];
  const Operator* operators[MOST];
  size_t count;
} Domain;
typedef struct {
  Domain* domains[8];
  size_t count;
  char key[8][128];
  size_t keys;
} Options;

static void fail(const char* why) {
  fprintf(stderr, "host: %s\n", why);
  exit(2);
}

static void* memory(size_t bytes) {
  void* made = calloc(1, bytes ? bytes : 1);
  if (made == NULL) fail("no memory");
  return made;
}

/* --- The API */

static Status* create_status(int code, const char* text) {
  if (code == 0) fail("an error without a code");
  Status* made = memory(sizeof *made);
  snprintf(made->text, sizeof made->text, "%s", text);
  return made;
}
static Status* create_domain(const char* name, Domain** made) {
  *made = memory(sizeof **made);
  snprintf((*made)->name, sizeof (*made)->name, "%s", name);
  return NULL;
}
static Status* domain_add(Domain* domain, const Operator* operator) {
  if (domain->count == MOST) fail("too many operators");
  domain->operators[domain->count++] = operator;
  return NULL;
}
static Status* add_domain(Options* options, Domain* domain) {
  for (size_t i = 0; i < options->count; i++) {
    if (strcmp(options->domains[i]->name, domain->name) == 0) return create_status(1, "a domain of this name is known");
  }
  options->domains[options->count++] = domain;
  return NULL;
}
static Status* tensor_data(Value* value, void** data) { return *data = value->block + OFFSET, NULL; }
static Status* create_shape(Shape** made) { return *made = memory(sizeof **made), NULL; }
static Status* set_element_type(Shape* shape, int type) { return shape->type = type, NULL; }
static Status* set_dimensions(Shape* shape, const int64_t* sizes, size_t count) {
  shape->count = count;
  if (count) memcpy(shape->size, sizes, count * sizeof *sizes);
  return NULL;
}
static Status* element_type(const Shape* shape, int* type) { return *type = shape->type, NULL; }
static Status* dimensions_count(const Shape* shape, size_t* count) { return *count = shape->count, NULL; }
static Status* dimensions(const Shape* shape, int64_t* sizes, size_t count) {
  memcpy(sizes, shape->size, count * sizeof *sizes);
  return NULL;
}
static Status* tensor_shape(const Value* value, Shape** made) {
  *made = memory(sizeof **made);
  **made = value->shape;
  return NULL;
}
static Status* context_input(const Context* context, size_t index, const Value** value) {
  if (index >= context->inputs) return create_status(2, "there is no such input");
  *value = &context->input[index];
  return NULL;
}
static size_t bytes_of(const Shape* shape) {
  static const unsigned char width[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8};
  if (shape->type <= 0 || shape->type >= (int)sizeof width || !width[shape->type]) fail("an unknown type");
  size_t bytes = width[shape->type];
  for (size_t i = 0; i < shape->count; i++) bytes *= (size_t)shape->size[i];
  return bytes;
}
static void allocate(Value* value) {
  value->bytes = bytes_of(&value->shape);
  if (posix_memalign((void**)&value->block, 64, OFFSET + value->bytes)) fail("no memory");
}
static Status* context_output(const Context* context, size_t index, const int64_t* sizes, size_t count, Value** value) {
  if (index >= context->outputs) return create_status(2, "there is no such output");
  *value = &context->output[index];
  (*value)->shape.type = context->operator->output_type(context->operator, index);
  set_dimensions(&(*value)->shape, sizes, count);
  if ((*value)->block != NULL) fail("an output was asked for twice");
  allocate(*value);
  return NULL;
}
/* Shapes are inferred from those of a call's inputs, as numbers without names. */
typedef struct {
  const Context* given;
  Shape* outputs;
} Inference;
static Status* infer_input(const Inference* inference, size_t index, const Shape** shape) {
  if (index >= inference->given->inputs) return create_status(2, "there is no such input");
  return *shape = &inference->given->input[index].shape, NULL;
}
static Status* infer_set_output(Inference* inference, size_t index, const Shape* shape) {
  return inference->outputs[index] = *shape, NULL;
}
static Status* symbolic_dimensions(const Shape* shape, const char** names, size_t count) {
  if (count != shape->count) fail("names for another number of dimensions");
  for (size_t i = 0; i < count; i++) names[i] = "";
  return NULL;
}
static Status* set_symbolic_dimensions(Shape* shape, const char** names, size_t count) {
  if (count != shape->count) fail("names for another number of dimensions");
  for (size_t i = 0; i < count; i++) if (names[i][0]) fail("a name from nowhere");
  return NULL;
}
static Status* add_config_entry(Options* options, const char* key, const char* value) {
  if (strcmp(value, "1") != 0) fail("a strange entry");
  snprintf(options->key[options->keys++], sizeof *options->key, "%s", key);
  return NULL;
}
static Status* has_config_entry(const Options* options, const char* key, int* known) {
  *known = 0;
  for (size_t i = 0; i < options->keys; i++) *known |= strcmp(options->key[i], key) == 0;
  return NULL;
}

struct part {
  void (*run)(void*, size_t);
  void* data;
  size_t next, total;
};
static void* run_parts(void* given) {
  struct part* part = given;
  for (size_t i; (i = __atomic_fetch_add(&part->next, 1, __ATOMIC_RELAXED)) < part->total;) part->run(part->data, i);
  return NULL;
}
static Status* parallel_for(const Context* context, void (*run)(void*, size_t), size_t total, size_t batch, void* data) {
  (void)context, (void)batch;
  struct part part = {run, data, 0, total};
  pthread_t helper[2];
  for (int i = 0; i < 2; i++) {
    if (pthread_create(&helper[i], NULL, run_parts, &part)) fail("no thread");
  }
  run_parts(&part);
  for (int i = 0; i < 2; i++) pthread_join(helper[i], NULL);
  return NULL;
}

static const Api* get_api(uint32_t version) {
  static const Api api = {{
      [0] = create_status,  [26] = create_domain,    [27] = domain_add,    [28] = add_domain,
      [51] = tensor_data,   [57] = create_shape,     [58] = set_element_type, [59] = set_dimensions,
      [60] = element_type,  [61] = dimensions_count, [62] = dimensions,    [65] = tensor_shape,
      [90] = context_input, [91] = context_output,   [93] = free,          [99] = free,
      [63] = symbolic_dimensions, [268] = infer_input, [271] = set_symbolic_dimensions,
      [101] = free,         [130] = add_config_entry, [237] = has_config_entry, [270] = infer_set_output,
      [274] = parallel_for,
  }};
  if (version != 17) fail("another version of the API is asked for");
  return &api;
}
static const char* version(void) { return getenv("HOST_VERSION") ? getenv("HOST_VERSION") : "1.17.0"; }
static const Api* get_another_api(uint32_t version) {
  static Api copy;
  copy = *get_api(version);
  return &copy;
}

/* A domain belongs to one ONNX Runtime, there and for all options. */
static void check_domains(Status* (*add)(Options*, const ApiBase*), const Options* options) {
  static const ApiBase base = {get_api, version}, another = {get_another_api, version};
  Options more = {0}, theirs = {0};
  if (add(&more, &base) != NULL || add(&theirs, &another) != NULL) fail("more options cannot have the library");
  if (more.domains[0] != options->domains[0]) fail("a domain was made twice");
  if (theirs.domains[0] == options->domains[0]) fail("a domain is shared with another ONNX Runtime");
}

static int is_old(void) {
  unsigned minor = 0;
  return sscanf(version(), "1.%u", &minor) == 1 ? minor < 17 : version()[0] < '2' || version()[0] > '9';
}
static const Api* no_api(uint32_t version) {
  fprintf(stderr, "host: version %u is asked for\n", (unsigned)version);
  return NULL;
}

/* --- Calls and results */

static int64_t number(FILE* file) {
  int64_t read = 0;
  if (fread(&read, sizeof read, 1, file) != 1) fail("CALLS is too short");
  return read;
}

static void write_number(FILE* file, int64_t value) { fwrite(&value, sizeof value, 1, file); }

static void write_bytes(FILE* file, const void* data, size_t bytes) {
  static const char zeros[8];
  write_number(file, (int64_t)bytes);
  fwrite(data, 1, bytes, file);
  fwrite(zeros, 1, (8 - bytes % 8) % 8, file);
}

static void read_value(FILE* file, Value* value) {
  value->shape.type = (int)number(file);
  value->shape.count = (size_t)number(file);
  for (size_t i = 0; i < value->shape.count; i++) value->shape.size[i] = number(file);
  allocate(value);
  if (number(file) != (int64_t)value->bytes) fail("CALLS has an input of another size");
  if (fread(value->block + OFFSET, 1, value->bytes, file) != value->bytes) fail("CALLS is too short");
  fseek(file, (long)((8 - value->bytes % 8) % 8), SEEK_CUR);
}

struct call {
  const Operator* operator;
  void* kernel;
  Context given;
};
struct job {
  struct call* calls;
  int64_t count;
  Context* contexts; /* of the second round */
  Status** statuses;
};

static void release(Context* context) {
  for (size_t i = 0; i < context->outputs; i++) free(context->output[i].block);
  free(context->output);
}

static void* run_calls(void* given) {
  struct job* job = given;
  for (int round = 0; round < 2; round++) {
    for (int64_t i = 0; i < job->count; i++) {
      struct call* call = &job->calls[i];
      Context* context = &job->contexts[i];
      if (round) release(context), free(job->statuses[i]);
      *context = call->given;
      context->output = memory(context->outputs * sizeof(Value));
      job->statuses[i] = call->operator->compute_checked(call->kernel, context);
    }
  }
  return NULL;
}

static void check_shapes(const Operator* operator, const Context* context) {
  Shape* shapes = memory(context->outputs * sizeof *shapes);
  Inference inference = {context, shapes};
  if (operator->infer_shape(operator, &inference) != NULL) fail("shapes cannot be inferred");
  for (size_t i = 0; i < context->outputs; i++) {
    const Shape* had = &context->output[i].shape;
    if (shapes[i].type != had->type || shapes[i].count != had->count ||
        memcmp(shapes[i].size, had->size, had->count * sizeof *had->size) != 0) {
      fail("an output has another shape than was inferred");
    }
  }
  free(shapes);
}

static void same(const struct job* a, const struct job* b, int64_t i) {
  if ((a->statuses[i] == NULL) != (b->statuses[i] == NULL)) fail("one thread had an error, another had none");
  if (a->statuses[i] != NULL) return;
  for (size_t k = 0; k < a->contexts[i].outputs; k++) {
    const Value *x = &a->contexts[i].output[k], *y = &b->contexts[i].output[k];
    if (x->bytes != y->bytes || memcmp(x->block + OFFSET, y->block + OFFSET, x->bytes) != 0) fail("threads differ");
  }
}

static void write_results(FILE* file, const struct job* job) {
  for (int64_t i = 0; i < job->count; i++) {
    const Context* context = &job->contexts[i];
    const char* text = job->statuses[i] ? job->statuses[i]->text : "";
    write_bytes(file, text, strlen(text));
    if (job->statuses[i] != NULL) continue;
    check_shapes(job->calls[i].operator, context);
    write_number(file, (int64_t)context->outputs);
    for (size_t k = 0; k < context->outputs; k++) {
      write_bytes(file, context->output[k].block + OFFSET, context->output[k].bytes);
    }
  }
}

static void read_calls(FILE* file, const Domain* domain, const Api* api, struct call* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    size_t chosen = (size_t)number(file);
    if (chosen >= domain->count) fail("there is no such operator");
    const Operator* operator = calls[i].operator = domain->operators[chosen];
    Context* context = &calls[i].given;
    context->operator = operator;
    context->inputs = (size_t)number(file);
    context->outputs = operator->output_count(operator);
    context->input = memory(context->inputs * sizeof(Value));
    for (size_t k = 0; k < context->inputs; k++) read_value(file, &context->input[k]);
    if (operator->create_checked(operator, api, NULL, &calls[i].kernel) != NULL) fail("a kernel cannot be made");
  }
}

static void release_all(struct call* calls, struct job* jobs, int threads) {
  for (int t = 0; t < threads; t++) {
    for (int64_t i = 0; i < jobs[t].count; i++) release(&jobs[t].contexts[i]), free(jobs[t].statuses[i]);
    free(jobs[t].contexts), free(jobs[t].statuses);
  }
  for (int64_t i = 0; i < jobs[0].count; i++) {
    for (size_t k = 0; k < calls[i].given.inputs; k++) free(calls[i].given.input[k].block);
    free(calls[i].given.input);
    calls[i].operator->destroy(calls[i].kernel);
  }
  free(calls), free(jobs);
}

int main(int count, char** given) {
  if (count != 5) fail("give LIBRARY CALLS RESULTS THREADS");
  const ApiBase base = {is_old() ? no_api : get_api, version};
  static Options options;
  void* library = dlopen(given[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) fail(dlerror());
  Status* (*add)(Options*, const ApiBase*) = (Status * (*)(Options*, const ApiBase*)) dlsym(library, "RegisterCustomOps");
  if (add == NULL) fail(dlerror());
  for (int i = 0; i < 2; i++) {
    Status* status = add(&options, &base);
    if (status != NULL) fail(status->text);
  }
  FILE *calls_file = fopen(given[2], "rb"), *results = fopen(given[3], "wb");
  int threads = atoi(given[4]);
  if (calls_file == NULL || results == NULL || threads < 1) fail("CALLS or RESULTS cannot be opened");
  write_number(results, options.count ? (int64_t)options.domains[0]->count : 0);
  if (options.count) {
    check_domains(add, &options);
    int64_t number_of_calls = number(calls_file);
    struct call* calls = memory((size_t)number_of_calls * sizeof *calls);
    struct job* jobs = memory((size_t)threads * sizeof *jobs);
    pthread_t* running = memory((size_t)threads * sizeof *running);
    read_calls(calls_file, options.domains[0], get_api(17), calls, number_of_calls);
    for (int t = 0; t < threads; t++) {
      jobs[t] = (struct job){calls, number_of_calls, memory((size_t)number_of_calls * sizeof(Context)),
                             memory((size_t)number_of_calls * sizeof(Status*))};
      if (pthread_create(&running[t], NULL, run_calls, &jobs[t])) fail("no thread");
    }
    for (int t = 0; t < threads; t++) pthread_join(running[t], NULL);
    for (int t = 1; t < threads; t++) {
      for (int64_t i = 0; i < number_of_calls; i++) same(&jobs[0], &jobs[t], i);
    }
    write_results(results, &jobs[0]);
    release_all(calls, jobs, threads);
    free(running);
  }
  fclose(calls_file);
  if (fclose(results) != 0) fail("RESULTS cannot be written");
  return 0;
}
