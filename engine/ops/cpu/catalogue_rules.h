// Building blocks of the generated rules of the catalogue: matching shapes with symbols, and checks of values.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "calls.h"
#include "group.h"

namespace {

inline int64_t pad(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// A size of an axis, -1 where it is not known; `symbol` times `factor` where it is that.
struct Axis {
  int64_t needed;
  int64_t* symbol;
  int64_t factor;
};
inline Axis symbol(int64_t& s) { return {s, &s, 1}; }
inline Axis multiple(int64_t factor, int64_t& s) { return {s < 0 || factor < 0 ? -1 : factor * s, &s, factor}; }
inline Axis size(std::initializer_list<int64_t> of, int64_t value) {
  for (const int64_t each : of)
    if (each < 0) return {-1, nullptr, 1};
  return {value, nullptr, 1};
}

inline const char* name_of(int32_t type) {
  static const char* const names[] = {"float32", "bfloat16", "float16", "int8", "uint8", "int32"};
  return type >= kF32 && type <= kI32 ? names[type] : "of another type";
}

template <class Sizes, class Size>
std::string text_of(const Sizes& sizes, int64_t count, Size size) {
  std::string text = "(";
  for (int64_t i = 0; i < count; i++) {
    const int64_t value = size(sizes[i]);
    text += (i ? ", " : "") + (value < 0 ? "any" : std::to_string(value));
  }
  return text + ")";
}

// Set the symbols that are not known yet to the sizes that they stand for.
inline void take(const LlmArray& array, int32_t rank, std::initializer_list<std::pair<int, int64_t*>> symbols) {
  if (array.rank != rank) return;
  for (const auto& [axis, s] : symbols)
    if (*s < 0) *s = array.shape[axis];
}

// Check an array, and set the symbols that follow from it.
inline std::string fit(const char* name, const LlmArray& array, std::initializer_list<int32_t> types,
                       std::initializer_list<Axis> axes) {
  const auto rank = static_cast<int32_t>(axes.size());
  const Axis* axis = axes.begin();
  bool fits = array.rank == rank;
  for (int i = 0; fits && i < rank; i++) {
    const int64_t found = array.shape[i];
    fits = axis[i].factor > 0 && (found < 0 || (axis[i].needed < 0 ? found % axis[i].factor == 0 : found == axis[i].needed));
    if (fits && axis[i].symbol && *axis[i].symbol < 0 && found >= 0) *axis[i].symbol = found / axis[i].factor;
  }
  if (!fits) {
    std::string needs = text_of(axis, rank, [](const Axis& a) { return a.needed; });
    for (int i = 0; i < rank; i++)
      if (axis[i].needed < 0 && axis[i].factor > 1)
        needs += ", axis " + std::to_string(i) + " a multiple of " + std::to_string(axis[i].factor);
    const std::string found = text_of(array.shape, array.rank, [](int64_t s) { return s; });
    return std::string(name) + " has shape " + found + ", needs " + needs;
  }
  bool is_typed = array.type < 0;
  std::string names;
  for (const int32_t type : types) {
    is_typed = is_typed || type == array.type;
    names += (names.empty() ? "" : " or ") + std::string(name_of(type));
  }
  return is_typed ? std::string() : std::string(name) + " is " + name_of(array.type) + ", needs " + names;
}

inline void make(LlmArray& array, int32_t type, std::initializer_list<Axis> axes) {
  array.type = type;
  array.rank = 0;
  for (const Axis& axis : axes) array.shape[array.rank++] = axis.needed;
}

inline void same(LlmArray& array, const LlmArray& as) { array = as; }

template <class T>
void point(T*& pointer, const LlmArray& array) {
  pointer = static_cast<T*>(array.data);
}

inline std::string broken(const char* op, const char* condition,
                          std::initializer_list<std::pair<const char*, int64_t>> values) {
  std::string text;
  for (const auto& [name, value] : values) text += (text.empty() ? "" : ", ") + std::string(name) + " is " + std::to_string(value);
  return std::string(op) + ": " + text + ", needs " + condition;
}

inline std::string outside(const std::string& name, const int32_t* ids, int64_t count, int64_t end,
                           int64_t begin = 0) {
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < begin || ids[i] >= end)
      return name + " holds " + std::to_string(ids[i]) + ", needs " + std::to_string(begin) + " .. " +
             std::to_string(end - 1);
  return {};
}

// Checks that no declaration can express. A wrong number here would write to another request's cache, or outside of it.
template <class Args>
std::string check_values(const Args&) {
  return {};
}

// The rows of each request, which has `count` of them behind those of the requests before it.
template <class Args>
std::string check_requests(const char* op, const Args& a) {
  const std::string name = op;
  if (a.query_starts[0] != 0 || a.query_starts[a.B] != a.T)
    return name + ": query_starts must run from 0 to " + std::to_string(a.T);
  for (int64_t b = 0; b < a.B; b++) {
    const int64_t count = a.query_starts[b + 1] - a.query_starts[b];
    if (count < 0 || a.context_lens[b] < 0)
      return name + ": request " + std::to_string(b) + " has " + std::to_string(count) + " tokens after " +
             std::to_string(a.context_lens[b]);
  }
  return {};
}

// The blocks of each request's positions.
template <class Args>
std::string check_blocks(const std::string& op, const Args& a) {
  if (std::string error = check_requests(op.c_str(), a); !error.empty()) return error;
  for (int64_t b = 0; b < a.B; b++) {
    const int64_t count = a.query_starts[b + 1] - a.query_starts[b];
    const int64_t blocks = pad(a.context_lens[b] + count, a.block_size) / a.block_size;
    if (blocks > a.max_blocks)
      return op + ": block_tables has " + std::to_string(a.max_blocks) + " blocks a request, needs " +
             std::to_string(blocks);
    std::string error = outside(op + ": block_tables", a.block_tables + b * a.max_blocks, blocks, a.num_blocks);
    if (!error.empty()) return error;
  }
  return {};
}

inline std::string check_values(const LlmPagedAttention& a) { return check_blocks("paged_attention", a); }
inline std::string check_values(const LlmLatentAttention& a) { return check_blocks("latent_attention", a); }

template <class Args>
std::string check_state(const char* op, const Args& a, int64_t num_lines) {
  if (std::string error = check_requests(op, a); !error.empty()) return error;
  const int64_t size = a.state_type == kF32 ? 4 : a.state_type == kI8 ? 1 : 2;
  const int64_t lines = a.num_parts * (a.planes * a.slices * a.rows * a.row_width * size / (4 * a.head_dim));
  if (lines < num_lines)
    return std::string(op) + ": the state has " + std::to_string(lines) + " lines, needs " + std::to_string(num_lines);
  return outside(std::string(op) + ": state_tables", a.state_tables, a.B * a.num_parts, a.num_blocks);
}

inline std::string check_values(const LlmCausalConv& a) { return check_state("causal_conv", a, a.C / a.head_dim * 16); }

inline std::string check_values(const LlmGatedDeltaRule& a) {
  const int64_t value_lines = a.head_dim + 80 + (80 + a.head_dim) / a.head_dim;
  return check_state("gated_delta_rule", a, a.first_line + a.num_k_heads * 80 + a.num_v_heads * value_lines);
}

inline std::string check_values(const LlmReplaceRows& a) {
  return outside("replace_rows: rows", a.rows, a.T, a.E, -1);
}

inline std::string check_values(const LlmAddGatheredRows& a) {
  return outside("add_gathered_rows: rows", a.rows, a.T, a.E, -1);
}

inline std::string check_values(const LlmBidirectionalAttention& a) {
  int32_t end = 0;
  for (int64_t b = 0; b < a.B && end >= 0; b++) end = a.segment_ends[b] < end ? -1 : a.segment_ends[b];
  return end == a.T ? "" : "bidirectional_attention: segment_ends must ascend to " + std::to_string(a.T);
}

inline std::string check_values(const LlmAllGather& a) {
  if (a.num_ranks == llm_num_ranks()) return {};
  return "all_gather: num_ranks is " + std::to_string(a.num_ranks) + ", this process is one of " +
         std::to_string(llm_num_ranks());
}

#include "catalogue_calls.h"

}  // namespace
