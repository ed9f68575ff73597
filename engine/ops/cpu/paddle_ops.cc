// The catalogue as Paddle custom operators `llm_<op>`. The code that differs between ops is generated
// (catalogue_paddle.h).
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "paddle/extension.h"

namespace {

using paddle::DataType;
using paddle::Tensor;
using Shape = std::vector<int64_t>;
constexpr int kMostArrays = 12;

const LlmKernels& kernels() {
  static const LlmKernels* chosen = [] {
    const char* isa = std::getenv("CPU_ISA");
    const LlmKernels* found = llm_kernels(isa && *isa ? isa : nullptr);
    PD_CHECK(found, "CPU_ISA is ", isa, ", it must be one of ", llm_isas(1, 1));
    return found;
  }();
  return *chosen;
}

constexpr DataType kTypes[] = {DataType::FLOAT32, DataType::BFLOAT16, DataType::FLOAT16,
                               DataType::INT8,    DataType::UINT8,    DataType::INT32};  // in the order of LlmType

int32_t type_of(DataType type) {
  for (int32_t i = 0; i <= kI32; i++)
    if (kTypes[i] == type) return i;
  return kI32 + 1;
}

// Inputs and attributes of one call, in the catalogue's order.
struct Given {
  LlmArray arrays[kMostArrays] = {};
  double attributes[kMostArrays] = {};
  int num_arrays = 0, num_attributes = 0;

  void add(const Tensor& x) {
    PD_CHECK(x.is_cpu(), "input ", num_arrays, " is not on the CPU");
    add(x.shape());
    arrays[num_arrays - 1].type = type_of(x.dtype());
    arrays[num_arrays - 1].data = const_cast<void*>(x.data());  // in-place inputs arrive as const references too
  }
  void add(const Shape& shape) {
    LlmArray& array = arrays[num_arrays++];
    array.type = -1;
    array.rank = static_cast<int32_t>(shape.size());
    for (size_t i = 0; i < shape.size() && i < 5; i++) array.shape[i] = shape[i];
  }
  template <class T>
  void add(const paddle::optional<T>& x) {
    if (x)
      add(*x);
    else
      arrays[num_arrays++].rank = -1;
  }
  void add(int value) { attributes[num_attributes++] = value; }
  void add(float value) { attributes[num_attributes++] = static_cast<double>(value); }
};

template <class... Inputs>
Given given_of(const Inputs&... inputs) {
  Given given;
  (given.add(inputs), ...);
  return given;
}

Shape shape_of(const LlmArray& array) { return {array.shape, array.shape + array.rank}; }

void must(const char* trouble) { PD_CHECK(!trouble, trouble); }

// Outputs with memory of their own; an input that is updated in place is not among them.
template <int32_t op, class... Inputs>
std::vector<Tensor> kernel(Inputs... inputs) {
  Given given = given_of(inputs...);
  must(llm_shapes(op, given.arrays, given.attributes));
  std::vector<Tensor> outputs;
  for (int i = 0; i < kOutputs[op].num_made; i++) {
    LlmArray& array = given.arrays[given.num_arrays + i];
    outputs.push_back(paddle::empty(shape_of(array), kTypes[array.type], paddle::CPUPlace()));
    array.data = outputs.back().data();
  }
  must(llm_check(op, given.arrays, given.attributes));
  must(llm_call(&kernels(), op, given.arrays, given.attributes));
  return outputs;
}

template <int32_t op, class... Inputs>
std::vector<Shape> shapes(Inputs... inputs) {
  Given given = given_of(inputs...);
  must(llm_shapes(op, given.arrays, given.attributes));
  std::vector<Shape> found;
  for (int i = 0; i < kOutputs[op].count; i++) found.push_back(shape_of(given.arrays[given.num_arrays + i]));
  return found;
}

inline const DataType& type_in(const DataType& type) { return type; }
inline DataType type_in(const paddle::optional<DataType>& type) { return type ? *type : DataType::UNDEFINED; }

template <int32_t op, class... Inputs>
std::vector<DataType> types(Inputs... inputs) {
  const DataType given[] = {type_in(inputs)...};
  std::vector<DataType> found(static_cast<size_t>(kOutputs[op].num_made), DataType::FLOAT32);
  if (kOutputs[op].num_made > 0) found[0] = kTypes[kFirstOutput[op]];
  if (kOutputs[op].updated >= 0) found.push_back(given[kOutputs[op].updated]);
  return found;
}

}  // namespace

#include "catalogue_paddle.h"
