// The catalogue as Paddle custom operators `llm_<op>`: checks, output shapes, a call of the kernel.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "group.h"
#include "kernels.h"
#include "paddle/extension.h"

namespace {

using paddle::DataType;
using paddle::Tensor;
using Shape = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;
using Types = std::vector<DataType>;
using Shapes = std::vector<Shape>;
using OptionalTensor = paddle::optional<Tensor>;
using OptionalType = paddle::optional<DataType>;
using OptionalShape = paddle::optional<Shape>;

const LlmKernels& kernels() {
  static const LlmKernels* chosen = [] {
    const char* isa = std::getenv("CPU_ISA");
    const LlmKernels* found = llm_kernels(isa && *isa ? isa : nullptr);
    PD_CHECK(found, "CPU_ISA is ", isa, ", it must be one of ", llm_isas(1));
    return found;
  }();
  return *chosen;
}

std::string text(const Shape& shape) {
  std::string out = "(";
  for (const int64_t size : shape) out += (out.size() > 1 ? ", " : "") + (size < 0 ? "any" : std::to_string(size));
  return out + ")";
}

// A negative size in `shape` is any size.
void need(const char* op, const char* name, const Tensor& x, const Shape& shape, const Types& types) {
  const Shape found = x.shape();
  bool fits = found.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); i++) fits = shape[i] < 0 || shape[i] == found[i];
  PD_CHECK(fits, op, ": ", name, " has shape ", text(found), ", needs ", text(shape));
  bool typed = false;
  for (const DataType type : types) typed = typed || x.dtype() == type;
  PD_CHECK(typed, op, ": ", name, " is ", phi::DataTypeToString(x.dtype()), ", needs ",
           phi::DataTypeToString(types[0]));
  PD_CHECK(x.is_cpu(), op, ": ", name, " is not on the CPU");
}

constexpr int64_t kNoEnd = int64_t{1} << 31;  // of ids that other ranks may hold

void need_ids(const char* op, const char* name, const int32_t* ids, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; i++)
    PD_CHECK(ids[i] >= 0 && ids[i] < end, op, ": ", name, " holds ", ids[i], ", needs 0 .. ", end - 1);
}

const Types kF32 = {DataType::FLOAT32}, kI32 = {DataType::INT32};
const Types kWeight = {DataType::FLOAT32, DataType::BFLOAT16};

Tensor empty(const Shape& shape) { return paddle::empty(shape, DataType::FLOAT32, paddle::CPUPlace()); }
bool is_bf16(const Tensor& x) { return x.dtype() == DataType::BFLOAT16; }
// In-place inputs arrive as const references too.
template <class T>
T* writable(const Tensor& x) {
  return static_cast<T*>(const_cast<void*>(x.data()));
}

// A size that is not known yet when a graph is exported is -1.
int64_t half(int64_t size) { return size < 0 ? -1 : size / 2; }
int64_t twice(int64_t size) { return size < 0 ? -1 : size * 2; }

// What most ops make, whatever else they are given.
template <class... Rest>
Types f32(const Rest&...) {
  return kF32;
}
template <class... Rest>
Shapes as_first(const Shape& x, const Rest&...) {
  return {x};
}
template <class... Rest>
Shapes rows_by_rows(const Shape& x, const Shape& weight, const Rest&...) {
  return {{x[0], weight[0]}};
}

// ---- embedding ----

Tensors embedding(const Tensor& token_ids, const Tensor& table, int first_id) {
  need("embedding", "token_ids", token_ids, {-1}, kI32);
  need("embedding", "table", table, {-1, -1}, kWeight);
  const int64_t rows = token_ids.shape()[0], cols = table.shape()[1];
  need_ids("embedding", "token_ids", token_ids.data<int32_t>(), rows, kNoEnd);
  Tensor y = empty({rows, cols});
  LlmEmbedding args = {};
  args.token_ids = token_ids.data<int32_t>();
  args.table = table.data();
  args.y = y.data<float>();
  args.rows = rows;
  args.cols = cols;
  args.table_rows = table.shape()[0];
  args.first_id = first_id;
  args.table_kind = is_bf16(table) ? kBf16 : kFloat32;
  kernels().embedding(&args);
  return {y};
}
Shapes embedding_shape(const Shape& token_ids, const Shape& table, const int&) {
  return {{token_ids[0], table[1]}};
}

// ---- gather_rows ----

Tensors gather_rows(const Tensor& x, const Tensor& rows) {
  need("gather_rows", "x", x, {-1, -1}, kF32);
  need("gather_rows", "rows", rows, {-1}, kI32);
  const int64_t num_rows = rows.shape()[0], cols = x.shape()[1];
  need_ids("gather_rows", "rows", rows.data<int32_t>(), num_rows, x.shape()[0]);
  Tensor y = empty({num_rows, cols});
  kernels().gather_rows(x.data<float>(), rows.data<int32_t>(), y.data<float>(), num_rows, cols);
  return {y};
}
Shapes gather_rows_shape(const Shape& x, const Shape& rows) { return {{rows[0], x[1]}}; }

// ---- rms_norm ----

Tensors rms_norm(const Tensor& x, const Tensor& weight, float epsilon) {
  need("rms_norm", "x", x, {-1, -1}, kF32);
  need("rms_norm", "weight", weight, {x.shape()[1]}, kF32);
  Tensor y = empty(x.shape());
  kernels().rms_norm(x.data<float>(), weight.data<float>(), y.data<float>(), x.shape()[0], x.shape()[1],
                     epsilon);
  return {y};
}

// ---- add_rms_norm ----

Tensors add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, float epsilon) {
  need("add_rms_norm", "x", x, {-1, -1}, kF32);
  need("add_rms_norm", "residual", residual, x.shape(), kF32);
  need("add_rms_norm", "weight", weight, {x.shape()[1]}, kF32);
  Tensor y = empty(x.shape());
  kernels().add_rms_norm(x.data<float>(), writable<float>(residual), weight.data<float>(), y.data<float>(),
                         x.shape()[0], x.shape()[1], epsilon);
  return {y};
}
Shapes add_rms_norm_shape(const Shape& x, const Shape& residual, const Shape&, const float&) {
  return {x, residual};
}
Types add_rms_norm_type(const DataType& x, const DataType& residual, const DataType&) { return {x, residual}; }

// ---- head_norm ----

Tensors head_norm(const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int num_heads,
                  int num_kv_heads, float epsilon) {
  const int64_t head_dim = q_weight.numel();
  need("head_norm", "qkv", qkv, {-1, (num_heads + 2 * num_kv_heads) * head_dim}, kF32);
  need("head_norm", "q_weight", q_weight, {head_dim}, kF32);
  need("head_norm", "k_weight", k_weight, {head_dim}, kF32);
  Tensor y = empty(qkv.shape());
  kernels().head_norm(qkv.data<float>(), q_weight.data<float>(), k_weight.data<float>(), y.data<float>(),
                      qkv.shape()[0], num_heads, num_kv_heads, head_dim, epsilon);
  return {y};
}

// ---- linear ----

Tensors linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  need("linear", "x", x, {-1, -1}, kF32);
  need("linear", "weight", weight, {-1, x.shape()[1]}, kWeight);
  const int64_t rows = x.shape()[0], width = x.shape()[1], num_out = weight.shape()[0];
  if (bias) need("linear", "bias", *bias, {num_out}, kF32);
  Tensor y = empty({rows, num_out});
  kernels().linear(x.data<float>(), weight.data(), is_bf16(weight) ? kBf16 : kFloat32, bias ? bias->data<float>() : nullptr,
                   y.data<float>(), rows, width, num_out);
  return {y};
}

// ---- linear_int8, linear_a8w8, linear_int4 ----

using Kernel = void (*)(const LlmQuantizedLinear* args);
struct Weight {
  const Tensor &codes, &scale;
  const OptionalTensor& zero;
};

Tensors quantized(const char* op, Kernel kernel, const Tensor& x, const Weight& weight, const OptionalTensor& bias) {
  const int64_t rows = x.shape()[0], num_out = weight.codes.shape()[0];
  if (bias) need(op, "bias", *bias, {num_out}, kF32);
  Tensor y = empty({rows, num_out});
  LlmQuantizedLinear args = {};
  args.x = x.data<float>();
  args.weight = weight.codes.data();
  args.scale = weight.scale.data();
  args.zero = weight.zero ? weight.zero->data() : nullptr;
  args.bias = bias ? bias->data<float>() : nullptr;
  args.y = y.data<float>();
  args.rows = rows;
  args.width = x.shape()[1];
  args.num_out = num_out;
  kernel(&args);
  return {y};
}

Tensors of_bytes(const char* op, Kernel kernel, const Tensor& x, const Weight& weight, const OptionalTensor& bias) {
  need(op, "x", x, {-1, -1}, kF32);
  need(op, "weight", weight.codes, {-1, x.shape()[1]}, {DataType::INT8});
  need(op, "scale", weight.scale, {weight.codes.shape()[0]}, kF32);
  return quantized(op, kernel, x, weight, bias);
}
Tensors linear_int8(const Tensor& x, const Tensor& weight, const Tensor& scale, const OptionalTensor& bias) {
  return of_bytes("linear_int8", kernels().linear_int8, x, {weight, scale, {}}, bias);
}
Tensors linear_a8w8(const Tensor& x, const Tensor& weight, const Tensor& scale, const OptionalTensor& bias) {
  return of_bytes("linear_a8w8", kernels().linear_a8w8, x, {weight, scale, {}}, bias);
}

Tensors linear_int4(const Tensor& x, const Tensor& weight, const Tensor& scale, const OptionalTensor& zero,
                    const OptionalTensor& bias) {
  const char* op = "linear_int4";
  need(op, "x", x, {-1, -1}, kF32);
  const int64_t width = (x.shape()[1] + 127) / 128 * 128, num_out = weight.shape()[0];
  need(op, "weight", weight, {-1, width / 2}, {DataType::UINT8});
  need(op, "scale", scale, {num_out, width / 64}, {DataType::BFLOAT16});
  if (zero) need(op, "zero", *zero, {num_out, width / 64}, {DataType::BFLOAT16});
  return quantized(op, kernels().linear_int4, x, {weight, scale, zero}, bias);
}

// ---- linear_fp8: made into a weight of bf16 ----

uint16_t bf16_of(uint8_t number, float scale) {
  const int exponent = number >> 3 & 15, mantissa = number & 7;
  const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(1.0f * mantissa, -9);
  const float value = (number & 128 ? -size : size) * scale;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

Tensors linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& scale, const OptionalTensor& bias) {
  const char* op = "linear_fp8";
  need(op, "x", x, {-1, -1}, kF32);
  const int64_t rows = x.shape()[0], width = x.shape()[1], num_out = weight.shape()[0];
  need(op, "weight", weight, {-1, width}, {DataType::UINT8});
  const int64_t groups = scale.shape()[1] == 1 ? 1 : (width + 127) / 128;
  need(op, "scale", scale, {num_out, groups}, kF32);
  if (bias) need(op, "bias", *bias, {num_out}, kF32);
  std::vector<uint16_t> wide(static_cast<size_t>(num_out * width));
  const float* scales = scale.data<float>();
  for (int64_t i = 0; i < num_out * width; i++)
    wide[static_cast<size_t>(i)] =
        bf16_of(weight.data<uint8_t>()[i], scales[i / width * groups + (groups > 1 ? i % width / 128 : 0)]);
  Tensor y = empty({rows, num_out});
  kernels().linear(x.data<float>(), wide.data(), kBf16, bias ? bias->data<float>() : nullptr, y.data<float>(), rows, width,
                   num_out);
  return {y};
}

// ---- rotary_angles ----

Tensors rotary_angles(const Tensor& positions, const Tensor& inv_freq, float attention_scaling) {
  need("rotary_angles", "positions", positions, {-1}, kI32);
  need("rotary_angles", "inv_freq", inv_freq, {-1}, kF32);
  const int64_t rows = positions.shape()[0], cols = inv_freq.shape()[0];
  Tensor y = empty({rows, 2 * cols});
  kernels().rotary_angles(positions.data<int32_t>(), inv_freq.data<float>(), y.data<float>(), rows, cols,
                          attention_scaling);
  return {y};
}
Shapes rotary_angles_shape(const Shape& positions, const Shape& inv_freq, const float&) {
  return {{positions[0], twice(inv_freq[0])}};
}

// ---- paged_attention ----

void check_batch(const LlmAttention& a, int64_t num_tokens, int64_t num_blocks) {
  const char* op = "paged_attention";
  PD_CHECK(a.query_starts[0] == 0 && a.query_starts[a.num_requests] == num_tokens, op,
           ": query_starts must run from 0 to ", num_tokens);
  for (int64_t b = 0; b < a.num_requests; b++) {
    const int64_t count = a.query_starts[b + 1] - a.query_starts[b];
    const int64_t blocks = (a.context_lens[b] + count + a.block_size - 1) / a.block_size;
    PD_CHECK(count >= 0 && a.context_lens[b] >= 0, op, ": request ", b, " has ", count, " tokens after ",
             a.context_lens[b]);
    PD_CHECK(blocks <= a.max_blocks, op, ": block_tables has ", a.max_blocks, " blocks a request, needs ", blocks);
    need_ids(op, "block_tables", a.block_tables + b * a.max_blocks, blocks, num_blocks);
  }
}

Tensors paged_attention(const Tensor& qkv, const Tensor& cos_sin, const Tensor& kv_cache,
                        const Tensor& query_starts, const Tensor& context_lens, const Tensor& block_tables,
                        int num_heads, int num_kv_heads, float scale) {
  const char* op = "paged_attention";
  need(op, "kv_cache", kv_cache, {-1, 2, num_kv_heads, -1, -1},
       {DataType::FLOAT32, DataType::BFLOAT16, DataType::INT8});
  const bool is_int8 = kv_cache.dtype() == DataType::INT8;  // a row ends in the two bytes of its scale
  const int64_t block_size = kv_cache.shape()[3], head_dim = kv_cache.shape()[4] - (is_int8 ? 2 : 0);
  need(op, "qkv", qkv, {-1, (num_heads + 2 * num_kv_heads) * head_dim}, kF32);
  const int64_t num_tokens = qkv.shape()[0];
  need(op, "cos_sin", cos_sin, {num_tokens, -1}, kF32);
  need(op, "context_lens", context_lens, {-1}, kI32);
  const int64_t num_requests = context_lens.shape()[0], rotary_dim = cos_sin.shape()[1];
  need(op, "query_starts", query_starts, {num_requests + 1}, kI32);
  need(op, "block_tables", block_tables, {num_requests, -1}, kI32);
  PD_CHECK(num_heads % num_kv_heads == 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0 &&
               head_dim % 2 == 0,
           op, ": ", num_heads,
           " heads, ", num_kv_heads, " key/value heads of ", head_dim, ", ", rotary_dim,
           " of them rotated: must divide, must be even and fit");
  Tensor out = empty({num_tokens, num_heads * head_dim});
  LlmAttention args = {};
  args.qkv = qkv.data<float>();
  args.cos_sin = cos_sin.data<float>();
  args.kv_cache = writable<void>(kv_cache);
  args.query_starts = query_starts.data<int32_t>();
  args.context_lens = context_lens.data<int32_t>();
  args.block_tables = block_tables.data<int32_t>();
  args.out = out.data<float>();
  args.num_requests = num_requests;
  args.num_heads = num_heads;
  args.num_kv_heads = num_kv_heads;
  args.head_dim = head_dim;
  args.rotary_dim = rotary_dim;
  args.block_size = block_size;
  args.max_blocks = block_tables.shape()[1];
  args.scale = scale;
  args.cache_bits = is_int8 ? 8 : is_bf16(kv_cache) ? 16 : 32;
  check_batch(args, num_tokens, kv_cache.shape()[0]);
  kernels().paged_attention(&args);
  return {out};
}
Shapes paged_attention_shape(const Shape& qkv, const Shape&, const Shape& kv_cache, const Shape&, const Shape&,
                             const Shape&, const int& num_heads, const int& num_kv_heads, const float&) {
  const int64_t heads = num_heads + 2 * num_kv_heads;
  return {{qkv[0], qkv[1] < 0 ? -1 : num_heads * (qkv[1] / heads)}, kv_cache};
}
Types paged_attention_type(const DataType& qkv, const DataType&, const DataType& kv_cache, const DataType&,
                           const DataType&, const DataType&) {
  return {qkv, kv_cache};
}

// ---- swiglu ----

Tensors swiglu(const Tensor& gate_up) {
  need("swiglu", "gate_up", gate_up, {-1, -1}, kF32);
  const int64_t rows = gate_up.shape()[0], width = gate_up.shape()[1];
  PD_CHECK(width % 2 == 0, "swiglu: gate_up has shape ", text(gate_up.shape()), ", needs an even width");
  Tensor y = empty({rows, width / 2});
  kernels().swiglu(gate_up.data<float>(), y.data<float>(), rows, width / 2);
  return {y};
}
Shapes swiglu_shape(const Shape& gate_up) { return {{gate_up[0], half(gate_up[1])}}; }

// ---- all_reduce, all_gather ----

Tensors all_reduce(const Tensor& x) {
  need("all_reduce", "x", x, {-1, -1}, kF32);
  Tensor y = empty(x.shape());
  const char* trouble = llm_all_reduce(x.data<float>(), y.data<float>(), x.numel());
  PD_CHECK(!trouble, "all_reduce: ", trouble);
  return {y};
}

Tensors all_gather(const Tensor& x, int num_ranks, int width) {
  need("all_gather", "x", x, {-1, -1}, kF32);
  const int64_t rows = x.shape()[0], cols = x.shape()[1];
  PD_CHECK(num_ranks == llm_num_ranks(), "all_gather: num_ranks is ", num_ranks, ", this process is one of ",
           llm_num_ranks());
  PD_CHECK(width >= 0 && width <= num_ranks * cols, "all_gather: width is ", width, ", needs 0 .. ",
           num_ranks * cols);
  Tensor y = empty({rows, width});
  const char* trouble = llm_all_gather(x.data<float>(), y.data<float>(), rows, cols, width);
  PD_CHECK(!trouble, "all_gather: ", trouble);
  return {y};
}
Shapes all_gather_shape(const Shape& x, const int&, const int& width) { return {{x[0], width}}; }

}  // namespace

PD_BUILD_OP(llm_embedding)
    .Inputs({"token_ids", "table"})
    .Outputs({"y"})
    .Attrs({"first_id: int"})
    .SetKernelFn(PD_KERNEL(embedding))
    .SetInferShapeFn(PD_INFER_SHAPE(embedding_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType>));

PD_BUILD_OP(llm_gather_rows)
    .Inputs({"x", "rows"})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(gather_rows))
    .SetInferShapeFn(PD_INFER_SHAPE(gather_rows_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType>));

PD_BUILD_OP(llm_rms_norm)
    .Inputs({"x", "weight"})
    .Outputs({"y"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(rms_norm))
    .SetInferShapeFn(PD_INFER_SHAPE(as_first<Shape, float>))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType>));

PD_BUILD_OP(llm_add_rms_norm)
    .Inputs({"x", "residual", "weight"})
    .Outputs({"y", "residual_out"})
    .Attrs({"epsilon: float"})
    .SetInplaceMap({{"residual", "residual_out"}})
    .SetKernelFn(PD_KERNEL(add_rms_norm))
    .SetInferShapeFn(PD_INFER_SHAPE(add_rms_norm_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(add_rms_norm_type));

PD_BUILD_OP(llm_head_norm)
    .Inputs({"qkv", "q_weight", "k_weight"})
    .Outputs({"y"})
    .Attrs({"num_heads: int", "num_kv_heads: int", "epsilon: float"})
    .SetKernelFn(PD_KERNEL(head_norm))
    .SetInferShapeFn(PD_INFER_SHAPE(as_first<Shape, Shape, int, int, float>))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType, DataType>));

PD_BUILD_OP(llm_linear)
    .Inputs({"x", "weight", paddle::Optional("bias")})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(linear))
    .SetInferShapeFn(PD_INFER_SHAPE(rows_by_rows<OptionalShape>))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType, OptionalType>));

PD_BUILD_OP(llm_linear_int8)
    .Inputs({"x", "weight", "scale", paddle::Optional("bias")})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(linear_int8))
    .SetInferShapeFn(PD_INFER_SHAPE(rows_by_rows<Shape, OptionalShape>))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType, DataType, OptionalType>));

PD_BUILD_OP(llm_linear_a8w8)
    .Inputs({"x", "weight", "scale", paddle::Optional("bias")})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(linear_a8w8))
    .SetInferShapeFn(PD_INFER_SHAPE(rows_by_rows<Shape, OptionalShape>))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType, DataType, OptionalType>));

PD_BUILD_OP(llm_linear_fp8)
    .Inputs({"x", "weight", "scale", paddle::Optional("bias")})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(linear_fp8))
    .SetInferShapeFn(PD_INFER_SHAPE(rows_by_rows<Shape, OptionalShape>))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType, DataType, OptionalType>));

PD_BUILD_OP(llm_linear_int4)
    .Inputs({"x", "weight", "scale", paddle::Optional("zero"), paddle::Optional("bias")})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(linear_int4))
    .SetInferShapeFn(PD_INFER_SHAPE(rows_by_rows<Shape, OptionalShape, OptionalShape>))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType, DataType, OptionalType, OptionalType>));

PD_BUILD_OP(llm_rotary_angles)
    .Inputs({"positions", "inv_freq"})
    .Outputs({"y"})
    .Attrs({"attention_scaling: float"})
    .SetKernelFn(PD_KERNEL(rotary_angles))
    .SetInferShapeFn(PD_INFER_SHAPE(rotary_angles_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType, DataType>));

PD_BUILD_OP(llm_paged_attention)
    .Inputs({"qkv", "cos_sin", "kv_cache", "query_starts", "context_lens", "block_tables"})
    .Outputs({"out", "kv_cache_out"})
    .Attrs({"num_heads: int", "num_kv_heads: int", "scale: float"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .SetKernelFn(PD_KERNEL(paged_attention))
    .SetInferShapeFn(PD_INFER_SHAPE(paged_attention_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paged_attention_type));

PD_BUILD_OP(llm_swiglu)
    .Inputs({"gate_up"})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(swiglu))
    .SetInferShapeFn(PD_INFER_SHAPE(swiglu_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType>));

PD_BUILD_OP(llm_all_reduce)
    .Inputs({"x"})
    .Outputs({"y"})
    .SetKernelFn(PD_KERNEL(all_reduce))
    .SetInferShapeFn(PD_INFER_SHAPE(as_first<>))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType>));

PD_BUILD_OP(llm_all_gather)
    .Inputs({"x"})
    .Outputs({"y"})
    .Attrs({"num_ranks: int", "width: int"})
    .SetKernelFn(PD_KERNEL(all_gather))
    .SetInferShapeFn(PD_INFER_SHAPE(all_gather_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(f32<DataType>));
