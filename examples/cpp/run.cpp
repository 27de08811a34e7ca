// Runs a model with the library of its kernels: ./run fast.onnx [fast.so]
//
// The only line that is special is that with RegisterCustomOpsLibrary. Without the library the same file runs as well,
// more slowly. The library must lie on this machine, for this processor; on another one ONNX Runtime takes the model as
// it is.
//
// Get ONNX Runtime (1.17 or later) with its headers from its releases, unpack it in ONNXRUNTIME_HOME, and either use
// CMakeLists.txt or:
//
//     c++ -std=c++17 -O2 run.cpp -I$ONNXRUNTIME_HOME/include -L$ONNXRUNTIME_HOME/lib -lonnxruntime -Wl,-rpath,$ONNXRUNTIME_HOME/lib -o run
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// A tensor of an input's type and shape, filled with 0.5. Dimensions without a number are 1.
Ort::Value filled(const Ort::Session& session, std::size_t index, OrtAllocator* allocator) {
  const Ort::TypeInfo info = session.GetInputTypeInfo(index);
  const auto tensor = info.GetTensorTypeAndShapeInfo();
  if (tensor.GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
    throw std::runtime_error("this example fills inputs of type float only");
  }
  std::vector<std::int64_t> shape = tensor.GetShape();
  std::replace_if(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; }, 1);
  Ort::Value value = Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), tensor.GetElementType());
  std::fill_n(value.GetTensorMutableData<float>(), value.GetTensorTypeAndShapeInfo().GetElementCount(), 0.5F);
  return value;
}

void run(const std::string& model, const std::string& library) {
  const Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "run");
  Ort::SessionOptions options;
  if (std::filesystem::exists(library)) {
    options.RegisterCustomOpsLibrary(std::filesystem::absolute(library).c_str());
    std::cout << "with the kernels of " << library << '\n';
  }
  Ort::Session session(env, model.c_str(), options);

  Ort::AllocatorWithDefaultOptions allocator;
  std::vector<Ort::AllocatedStringPtr> kept;  // owns the names
  std::vector<const char*> input_names;
  std::vector<const char*> output_names;
  std::vector<Ort::Value> inputs;
  for (std::size_t i = 0; i < session.GetInputCount(); i++) {
    kept.push_back(session.GetInputNameAllocated(i, allocator));
    input_names.push_back(kept.back().get());
    inputs.push_back(filled(session, i, allocator));
  }
  for (std::size_t i = 0; i < session.GetOutputCount(); i++) {
    kept.push_back(session.GetOutputNameAllocated(i, allocator));
    output_names.push_back(kept.back().get());
  }

  const std::vector<Ort::Value> outputs = session.Run(Ort::RunOptions{nullptr}, input_names.data(), inputs.data(),
                                                      inputs.size(), output_names.data(), output_names.size());
  for (std::size_t i = 0; i < outputs.size(); i++) {
    const auto about = outputs[i].GetTensorTypeAndShapeInfo();
    std::cout << output_names[i] << ": " << about.GetElementCount() << " elements";
    if (about.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
      const float* first = outputs[i].GetTensorData<float>();
      std::cout << ", their sum is " << std::accumulate(first, first + about.GetElementCount(), 0.0);
    }
    std::cout << '\n';
  }
}

}  // namespace

int main(int count, char** given) {
  if (count < 2) {
    std::cerr << "give a model: run fast.onnx [fast.so]\n";
    return 2;
  }
  const std::string model = given[1];
  try {
    run(model, count > 2 ? given[2] : std::filesystem::path(model).replace_extension(".so").string());
  } catch (const std::exception& error) {  // Ort::Exception is one
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
