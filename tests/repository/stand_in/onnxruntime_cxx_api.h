/* Stands in for ONNX Runtime's header of this name, which its Python package does not have: what examples/cpp uses of
 * it, on the functions of the C API by their numbers. */
#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 };
enum ONNXTensorElementDataType { ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1 };
struct OrtAllocator;
struct OrtStatus;

extern "C" {
struct StandInBase {
  const void* const* (*api)(std::uint32_t version);
  const char* (*version)();
};
const StandInBase* OrtGetApiBase() noexcept;
}

namespace Ort {

struct Exception : std::exception {
  explicit Exception(std::string given) : text(std::move(given)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

namespace stand_in {

template <typename Result, typename... Given>
Result plain(int number, Given... given) {
  return reinterpret_cast<Result (*)(Given...)>(const_cast<void*>(OrtGetApiBase()->api(17)[number]))(given...);
}

template <typename... Given>
void call(int number, Given... given) {
  OrtStatus* status = plain<OrtStatus*>(number, given...);
  if (status == nullptr) return;
  std::string text = plain<const char*>(2, static_cast<const OrtStatus*>(status));
  plain<void>(93, status);
  throw Exception(text);
}

template <int release>
struct Owned {
  explicit Owned(std::nullptr_t) {}
  Owned() = default;
  Owned(Owned&& other) noexcept : object(std::exchange(other.object, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept { return std::swap(object, other.object), *this; }
  ~Owned() {
    if (object != nullptr) plain<void>(release, object);
  }
  void* object = nullptr;
};

struct TensorInfo : Owned<99> {
  bool borrowed = false;
  TensorInfo() = default;
  TensorInfo(TensorInfo&& other) noexcept = default;
  ~TensorInfo() {
    if (borrowed) object = nullptr;
  }
  ONNXTensorElementDataType GetElementType() const {
    ONNXTensorElementDataType type{};
    call(60, object, &type);
    return type;
  }
  std::size_t GetElementCount() const {
    std::size_t count = 0;
    call(64, object, &count);
    return count;
  }
  std::vector<std::int64_t> GetShape() const {
    std::size_t count = 0;
    call(61, object, &count);
    std::vector<std::int64_t> shape(count);
    call(62, object, shape.data(), count);
    return shape;
  }
};

}  // namespace stand_in

struct AllocatorWithDefaultOptions {
  AllocatorWithDefaultOptions() { stand_in::call(78, &object); }
  operator OrtAllocator*() { return object; }
  OrtAllocator* object = nullptr;
};

struct FreedByAllocator {
  OrtAllocator* allocator = nullptr;
  void operator()(void* memory) const { stand_in::call(76, allocator, memory); }
};
using AllocatedStringPtr = std::unique_ptr<char, FreedByAllocator>;

struct Env : stand_in::Owned<92> {
  Env(OrtLoggingLevel level, const char* name) { stand_in::call(3, level, name, &object); }
};

struct SessionOptions : stand_in::Owned<100> {
  SessionOptions() { stand_in::call(10, &object); }
  SessionOptions& RegisterCustomOpsLibrary(const char* path) {
    void* handle = nullptr;  // stays loaded
    stand_in::call(29, object, path, &handle);
    return *this;
  }
};

struct RunOptions : stand_in::Owned<97> {
  using Owned::Owned;
};

struct TypeInfo : stand_in::Owned<98> {
  stand_in::TensorInfo GetTensorTypeAndShapeInfo() const {
    stand_in::TensorInfo found;
    found.borrowed = true;
    stand_in::call(55, object, &found.object);
    return found;
  }
};

struct Value : stand_in::Owned<96> {
  static Value CreateTensor(OrtAllocator* allocator, const std::int64_t* shape, std::size_t count,
                            ONNXTensorElementDataType type) {
    Value made;
    stand_in::call(48, allocator, shape, count, type, &made.object);
    return made;
  }
  stand_in::TensorInfo GetTensorTypeAndShapeInfo() const {
    stand_in::TensorInfo found;
    stand_in::call(65, object, &found.object);
    return found;
  }
  template <typename T>
  T* GetTensorMutableData() {
    return const_cast<T*>(GetTensorData<T>());
  }
  template <typename T>
  const T* GetTensorData() const {
    void* data = nullptr;
    stand_in::call(51, object, &data);
    return static_cast<const T*>(data);
  }
};

struct Session : stand_in::Owned<95> {
  Session(const Env& env, const char* path, const SessionOptions& options) {
    stand_in::call(7, env.object, path, options.object, &object);
  }
  std::size_t GetInputCount() const { return count(30); }
  std::size_t GetOutputCount() const { return count(31); }
  AllocatedStringPtr GetInputNameAllocated(std::size_t index, OrtAllocator* allocator) const {
    return name(36, index, allocator);
  }
  AllocatedStringPtr GetOutputNameAllocated(std::size_t index, OrtAllocator* allocator) const {
    return name(37, index, allocator);
  }
  TypeInfo GetInputTypeInfo(std::size_t index) const {
    TypeInfo found;
    stand_in::call(33, object, index, &found.object);
    return found;
  }
  std::vector<Value> Run(const RunOptions& options, const char* const* input_names, const Value* inputs,
                         std::size_t input_count, const char* const* output_names, std::size_t output_count) {
    std::vector<void*> given;
    std::vector<void*> made(output_count);
    for (std::size_t i = 0; i < input_count; i++) given.push_back(inputs[i].object);
    stand_in::call(9, object, options.object, input_names, given.data(), input_count, output_names, output_count,
                   made.data());
    std::vector<Value> outputs(output_count);
    for (std::size_t i = 0; i < output_count; i++) outputs[i].object = made[i];
    return outputs;
  }

 private:
  std::size_t count(int number) const {
    std::size_t found = 0;
    stand_in::call(number, object, &found);
    return found;
  }
  AllocatedStringPtr name(int number, std::size_t index, OrtAllocator* allocator) const {
    char* found = nullptr;
    stand_in::call(number, object, index, allocator, &found);
    return AllocatedStringPtr(found, FreedByAllocator{allocator});
  }
};

}  // namespace Ort
