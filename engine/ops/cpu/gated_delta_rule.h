// S = exp(g) S;  u = beta (v - k . S);  S = S + k u^T;  out = q . S, for each position and value head, with the sums in
// the order of chunks of 64 positions (docs/ops.md): the state is stored at the beginning of a chunk, and of every
// position since then its key k_i, its update u_i and its decay G_i, which is the sum of g from the beginning on.
#pragma once
#include <cmath>

#include "add_rows.h"
#include "parallel.h"
#include "state_lines.h"

namespace LLM_ISA {

constexpr int64_t kDeltaChunk = 64, kOpenRows = kDeltaChunk + 16;  // positions whose keys, updates and decays are kept

struct DeltaScratch {
  float* inputs;  // [2 * kDeltaChunk, D]: key and query of a position by turns, normalized
  float* scores;  // [2 * kDeltaChunk, kDeltaChunk]: their products with the keys of the chunk
  float* sums;    // [2 * kDeltaChunk, D]
  float* factors;  // [2, kDeltaChunk]
  float* weighted;  // [D, kDeltaChunk]: keys, transposed and decayed
  float* decays;  // [group, kOpenRows + 16]
  float* ahead;   // [group, D, D]: states behind the one that is stored
};

// One key head of one request, with the value heads that read it.
struct DeltaHead {
  const LlmGatedDeltaRule& a;
  const StateLines lines;
  const int64_t request, head, group, width;
  DeltaScratch scratch;
  int64_t base = 0;    // position of the stored state
  int64_t offset = 0;  // of the chunk that is computed, from there: 0 or kDeltaChunk

  DeltaHead(const LlmGatedDeltaRule& args, int64_t b, int64_t h)
      : a(args), lines(state_of(args, b)), request(b), head(h), group(args.num_v_heads / args.num_k_heads),
        width(args.head_dim) {
    carve();
  }

  int64_t decay_lines() const { return (kOpenRows + width) / width; }  // of kOpenRows decays, and of the base in the first head
  int64_t keys() const { return a.first_line + head * (kOpenRows + group * (width + kOpenRows + decay_lines())); }
  int64_t state(int64_t v) const { return keys() + kOpenRows + v * (width + kOpenRows + decay_lines()); }
  int64_t updates(int64_t v) const { return state(v) + width; }
  float* decay(int64_t v) const { return scratch.decays + v * (kOpenRows + 16); }

  void carve() {
    const struct {
      float** part;
      int64_t size;
    } parts[] = {{&scratch.inputs, 2 * kDeltaChunk * width}, {&scratch.scores, 2 * kDeltaChunk * kDeltaChunk},
                 {&scratch.sums, 2 * kDeltaChunk * width},   {&scratch.factors, 2 * kDeltaChunk},
                 {&scratch.weighted, width * kDeltaChunk},   {&scratch.decays, group * (kOpenRows + 16)},
                 {&scratch.ahead, group * width * width}};
    int64_t total = 0;
    for (const auto& each : parts) total += each.size;
    auto* memory = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(total)));
    for (const auto& each : parts) {
      *each.part = memory;
      memory += each.size;
    }
  }

  // body(lines, first, count) for the pieces of the stored state, or of the one ahead of it
  template <class Body>
  void each_state(int64_t v, bool is_ahead, Body body) const {
    if (is_ahead)
      body(scratch.ahead + v * width * width, 0, width);
    else
      lines.each_piece(state(v), width, body);
  }

  void copy_decays(bool is_stored) {
    for (int64_t v = 0; v < group; v++)
      lines.each_piece(updates(v) + kOpenRows, decay_lines(), [&](float* stored, int64_t first, int64_t count) {
        float* here = decay(v) + first * width;
        const int64_t n = min(count * width, kOpenRows + 1 - first * width);
        memcpy(is_stored ? here : stored, is_stored ? stored : here, sizeof(float) * static_cast<size_t>(n));
      });
  }

  // The state at the end of the stored chunk: S = exp(G_64) S + sum_i exp(G_64 - G_i) k_i u_i^T.
  void advance(int64_t v, bool is_ahead) {
    const float* decays = decay(v);
    const float whole = decays[kDeltaChunk - 1];
    for_lanes(kDeltaChunk, [&](int64_t i, int) { store(scratch.factors + i, exp_of_negative(whole - load(decays + i))); });
    lines.each_piece(keys(), kDeltaChunk, [&](const float* key, int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; i++, key += width)
        for (int64_t d = 0; d < width; d++) scratch.weighted[d * kDeltaChunk + i] = scratch.factors[i] * key[d];
    });
    const vec kept = exp_of_negative(set1(whole));
    each_state(v, is_ahead, [&](float* rows, int64_t d, int64_t count) {
      for_lanes(count * width, [&](int64_t i, int) { store(rows + i, kept * load(rows + i)); });
      lines.each_piece(updates(v), kDeltaChunk, [&](const float* updates, int64_t first, int64_t depth) {
        add_rows({scratch.weighted + d * kDeltaChunk + first, kDeltaChunk, updates, depth, width, rows}, count);
      });
    });
  }

  // Closes the chunk that the stored state begins, all of whose positions are final, and lets the next one begin.
  void catch_up(int64_t count) {
    for (int64_t v = 0; v < group; v++) advance(v, false);
    auto move = [&](int64_t first) {
      for (int64_t i = kDeltaChunk; i < count; i++)
        memcpy(lines.at(first + i - kDeltaChunk), lines.at(first + i), sizeof(float) * static_cast<size_t>(width));
    };
    move(keys());
    for (int64_t v = 0; v < group; v++) {
      move(updates(v));
      for (int64_t i = kDeltaChunk; i < count; i++) decay(v)[i - kDeltaChunk] = decay(v)[i];
    }
    base += kDeltaChunk;
  }

  void begin(int64_t position) {
    if (!position) {
      for (int64_t v = 0; v < group; v++)
        each_state(v, false, [&](float* rows, int64_t, int64_t count) {
          memset(rows, 0, sizeof(float) * static_cast<size_t>(count * width));
        });
      return;
    }
    copy_decays(true);
    base = static_cast<int64_t>(decay(0)[kOpenRows]) * kDeltaChunk;
    // A request that has ended may compute its last position again, which is not used.
    if (base > position || base + kOpenRows < position) base = position / kDeltaChunk * kDeltaChunk;
    if (position - base >= kDeltaChunk) catch_up(position - base);
  }

  // Positions begin .. end of the request.
  void run() {
    const int64_t start = a.query_starts[request], first = a.context_lens[request];
    const int64_t end = first + a.query_starts[request + 1] - start;
    if (end == first) return;
    begin(first);
    const int64_t final = end - kMaxRejected > first + 1 ? end - kMaxRejected : first + 1;
    for (int64_t p = first; p < end;) {
      const int64_t chunk = base + offset, count = min(chunk + kDeltaChunk, end) - p;
      add_positions(p - chunk, count, start + p - first);
      p += count;
      if (p < chunk + kDeltaChunk) break;
      if (p <= final) {
        for (int64_t v = 0; v < group; v++) advance(v, false);
        base = p;
      } else if (p < end) {
        look_ahead();
      }
    }
    decay(0)[kOpenRows] = static_cast<float>(base / kDeltaChunk);
    copy_decays(false);
  }

  // Goes on behind a chunk whose last positions may be rejected: that one stays open.
  void look_ahead() {
    for (int64_t v = 0; v < group; v++) {
      float* ahead = scratch.ahead + v * width * width;
      lines.each_piece(state(v), width, [&](const float* rows, int64_t first, int64_t count) {
        memcpy(ahead + first * width, rows, sizeof(float) * static_cast<size_t>(count * width));
      });
      advance(v, true);
    }
    offset = kDeltaChunk;
  }

  // Adds `count` positions to the chunk, from place `place` of it on; `t` is the row of the first.
  void add_positions(int64_t place, int64_t count, int64_t t) {
    for (int64_t j = 0; j < count; j++) {
      const float* query = a.qkv + (t + j) * (2 * a.num_k_heads + a.num_v_heads) * width + head * width;
      float* inputs = scratch.inputs + 2 * j * width;
      normalize(query + a.num_k_heads * width, 1.0f, inputs);
      normalize(query, 1.0f / sqrtf(static_cast<float>(width)), inputs + width);
      memcpy(lines.at(keys() + offset + place + j), inputs, sizeof(float) * static_cast<size_t>(width));
    }
    lines.each_piece(keys() + offset, place + count, [&](const float* key, int64_t first, int64_t num_keys) {
      for (int64_t j = 0; j < count; j++) {
        const int64_t end = min(first + num_keys, place + j + 1);
        int64_t i = first;
        for (; i + 4 <= end; i += 4) score<4>(j, i, key + (i - first) * width);
        for (; i < end; i++) score<1>(j, i, key + (i - first) * width);
      }
    });
    for (int64_t v = 0; v < group; v++) {
      memset(scratch.sums, 0, sizeof(float) * static_cast<size_t>(2 * count * width));
      each_state(v, offset > 0, [&](const float* rows, int64_t first, int64_t depth) {
        add_rows({scratch.inputs + first, width, rows, depth, width, scratch.sums}, 2 * count);
      });
      for (int64_t j = 0; j < count; j++) add_position(v, place + j, j, t + j);
    }
  }

  void normalize(const float* x, float scale, float* y) const {
    vec squares = set1(0.0f);
    for_lanes(width, [&](int64_t d, int) { squares = fma(load(x + d), load(x + d), squares); });
    const vec factor = set1(scale / sqrtf(sum(squares) + 1e-6f));
    for_lanes(width, [&](int64_t d, int) { store(y + d, factor * load(x + d)); });
  }

  // The products of key and query of row j with N keys from place i of the chunk on.
  template <int N>
  void score(int64_t j, int64_t i, const float* keys) {
    const float* inputs = scratch.inputs + 2 * j * width;
    vec with_key[N] = {}, with_query[N] = {};
    for_lanes(width, [&](int64_t d, int) {
      const vec key = load(inputs + d), query = load(inputs + width + d);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        const vec other = load(keys + n * width + d);
        with_key[n] = fma(key, other, with_key[n]);
        with_query[n] = fma(query, other, with_query[n]);
      }
    });
    float* scores = scratch.scores + 2 * j * kDeltaChunk + i;
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) scores[n] = sum(with_key[n]), scores[kDeltaChunk + n] = sum(with_query[n]);
  }

  // One position of a value head: row j of the scratch, row t of the arrays.
  void add_position(int64_t v, int64_t place, int64_t j, int64_t t) {
    const int64_t value_head = head * group + v;
    float* decays = decay(v) + offset;
    const float* gates = a.gates + t * 2 * a.num_v_heads + value_head;
    const float beta = 1.0f / (1.0f + expf(-gates[0])), x = gates[a.num_v_heads] + a.dt_bias[value_head];
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    const float total = (place ? decays[place - 1] : 0.0f) - expf(a.a_log[value_head]) * softplus;
    decays[place] = total;
    const float* scores = scratch.scores + 2 * j * kDeltaChunk;
    for_lanes(place + 1, [&](int64_t i, int) {
      const vec kept = exp_of_negative(total - load(decays + i));
      store(scratch.factors + i, kept * load(scores + i));
      store(scratch.factors + kDeltaChunk + i, kept * load(scores + kDeltaChunk + i));
    });
    float* sums = scratch.sums + 2 * j * width;
    const vec kept = exp_of_negative(set1(total));
    for_lanes(2 * width, [&](int64_t d, int) { store(sums + d, kept * load(sums + d)); });
    lines.each_piece(updates(v) + offset, place, [&](const float* updates, int64_t first, int64_t depth) {
      add_rows({scratch.factors + first, kDeltaChunk, updates, depth, width, sums}, 2);
    });
    float* update = lines.at(updates(v) + offset + place);
    const float* value = a.qkv + (t * (2 * a.num_k_heads + a.num_v_heads) + 2 * a.num_k_heads + value_head) * width;
    float* out = a.out + (t * a.num_v_heads + value_head) * width;
    const vec own = set1(scratch.factors[kDeltaChunk + place]);
    for_lanes(width, [&](int64_t d, int) {
      const vec u = beta * (load(value + d) - load(sums + d));
      store(update + d, u);
      store(out + d, fma(own, u, load(sums + width + d)));
    });
  }
};

inline void gated_delta_rule(const LlmGatedDeltaRule& a) {
  const int64_t work = a.T * a.num_v_heads * a.head_dim * a.head_dim;
  parallel_for(a.B * a.num_k_heads, 1, work, [&](int64_t i) {
    DeltaHead(a, i / a.num_k_heads, i % a.num_k_heads).run();
  });
}

}  // namespace LLM_ISA
