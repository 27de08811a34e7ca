/* What the generated tables of a kernel library say, and what runtime.c does with them.
 *
 * A region is a part of an ONNX model that became one operator. Its kernels are called in a fixed order. */
#ifndef XRLFLOW_RUNTIME_H
#define XRLFLOW_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

/* A tensor as TVM's kernels take it: DLTensor of DLPack 1.0. */
typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

/* An argument of a kernel: TVMFFIAny. */
typedef struct {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t v_int64;
    double v_float64;
    void* v_ptr;
  };
} Any;

enum { ANY_NONE = 0, ANY_INT = 1, ANY_TENSOR = 7 };

enum { MOST_DIMENSIONS = 64 };

typedef int (*Kernel)(void* self, const Any* arguments, int32_t count, Any* result);

/* Where the elements of a tensor are. */
enum place { INPUT, OUTPUT, ARENA, CONSTANT };

struct tensor {
  enum place place;
  uint64_t offset; /* the number of the input or output, or bytes in the arena or the constants */
  uint8_t code, bits;
  int32_t ndim;
  const int64_t* shape;
};

/* One call of a kernel. A negative argument -1 - i is the integer `integers[i]` of the plan. */
struct step {
  Kernel kernel;
  int32_t count;
  const int32_t* arguments;
};

/* The least and greatest element of a tensor of indices must be in [low, high]. The number goes between the texts. */
struct check {
  int64_t low, high;
  const char *before, *after; /* after: NULL if no number is shown */
};

/* An input or output. In a region for any number of rows, its first `open` dimensions have other sizes in each call:
 * those of input `like`; if `like` is -1, the last of them is the number of rows, and the others are 1. */
struct port {
  const char* name;
  int32_t type; /* ONNXTensorElementDataType */
  int32_t open, like;
  int32_t ndim;
  const int64_t* shape;
  uint64_t bytes; /* of all elements; of a row in a region for any number of rows */
};

/* What is called for a block of `rows` rows, or, if that is 0, for all sizes as they are. */
struct plan {
  int64_t rows;
  int32_t tensors, steps, checks;
  int32_t checked; /* the tensor int64[checks, 2] of least and greatest elements; -1 without checks */
  const int32_t *input, *output; /* the tensor of each */
  const struct tensor* tensor;
  const struct step* step;
  const struct check* check;
  const int64_t* integers;
  uint64_t arena; /* bytes */
};

struct region {
  const char* name;
  int32_t inputs, weights, outputs, plans; /* weights: inputs after these, which are not read */
  const struct port *input, *output;
  const struct plan* plan; /* those for more rows first */
};

/* A kernel of our own: copies a tensor. For outputs that are an input, a constant, or another output as well. */
int xrlflow_copy(void* self, const Any* arguments, int32_t count, Any* result);

/* Generated. */
extern const char xrlflow_domain[];
extern const char* const xrlflow_features[]; /* instructions that the kernels use; ends with NULL */
extern const int32_t xrlflow_tasks;          /* parts of a parallel loop */
extern const int32_t xrlflow_regions;
extern const struct region xrlflow_region[];
extern const unsigned char* const xrlflow_constants;
int xrlflow_runs_here(void); /* whether this processor has xrlflow_features */

#endif
