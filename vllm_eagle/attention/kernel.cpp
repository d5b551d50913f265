// Tree attention over vLLM's CPU cache layout. Contract: TreeAttention in base.py; specification: reference.py.
//
// A block of one K/V head is K transposed [K][block] followed by V [block][K], so both loops below run over
// contiguous numbers: scores over the tokens of a block, the weighted sum over the dimensions of a value.
// One task is a span of queries that share a K/V head; it reads each block from memory once and goes over it a tile at
// a time, while the block lies in the core's own cache. Tasks are independent.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <omp.h>
#include <vector>

namespace {

constexpr int TILE = 8;   // queries that share each load of K and V in registers
constexpr int SPAN = 64;  // most queries that share each read of a block from memory
constexpr int LANES = 16; // floats of one vector; the compiler splits it where registers are narrower
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

struct bf16 { uint16_t bits; };
typedef _Float16 f16;

inline vec load(const float* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
inline vec load(const f16* p) {
  typedef f16 half_vec __attribute__((vector_size(LANES * 2)));
  half_vec h; std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vec);
}
inline vec load(const bf16* p) {
  typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));
  half_vec h; std::memcpy(&h, p, sizeof h);
  ivec w = __builtin_convertvector(h, ivec) << 16;
  vec v; std::memcpy(&v, &w, sizeof v); return v;
}
inline void store(float* p, const float* v, int n) { std::memcpy(p, v, n * sizeof(float)); }
inline void store(f16* p, const float* v, int n) { for (int i = 0; i < n; ++i) p[i] = (f16)v[i]; }
inline void store(bf16* p, const float* v, int n) {
  for (int i = 0; i < n; ++i) {
    uint32_t w; std::memcpy(&w, v + i, 4);
    p[i].bits = (uint16_t)((w + 0x7fff + ((w >> 16) & 1)) >> 16); // round to nearest even
  }
}

// exp(x) for x <= 0: split off the power of two, polynomial on [-ln2/2, ln2/2], relative error 2e-7.
inline vec exp_vec(vec x) {
  const vec low = x < -87.0f ? vec{} + 1.0f : vec{};
  x = x < -87.0f ? vec{} - 87.0f : x;
  const vec t = x * 1.44269504f + 12582912.0f; // adding 1.5 * 2^23 rounds to the nearest integer
  ivec n; std::memcpy(&n, &t, sizeof n);
  const vec r = (x - (t - 12582912.0f) * 0.693359375f) + (t - 12582912.0f) * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ivec scale = (n - 0x4B400000 + 127) << 23;
  vec power; std::memcpy(&power, &scale, sizeof power);
  return low != 0.0f ? vec{} : p * power;
}
// tanh(x): an odd polynomial near 0, where 1 - exp would lose digits; relative error 5e-7.
inline vec tanh_vec(vec x) {
  const vec size = x < 0.0f ? -x : x;
  const vec t = exp_vec(-2.0f * size), far = (1.0f - t) / (1.0f + t), square = x * x;
  vec near = square * 2.1869488e-2f - 5.3968254e-2f;
  near = near * square + 1.3333333e-1f;
  near = near * square - 3.3333333e-1f;
  near = near * square * x + x;
  return size < 0.25f ? near : (x < 0.0f ? -far : far);
}
inline float sum(vec v) { float s = 0; for (int i = 0; i < LANES; ++i) s += v[i]; return s; }
inline float top(vec v) { float m = v[0]; for (int i = 1; i < LANES; ++i) m = std::max(m, v[i]); return m; }

// What a layer does to scores beyond their scale; 0 is none.
struct Scoring {
  int64_t window; // a row sees the last `window` positions, its own among them
  float cap;      // scores become cap * tanh(score / cap)
};

struct Softmax { float peak, total; }; // running maximum and sum of one query

// Write scores [T][block] of T queries [T][size] with the tokens of a block.
template <int T, typename E>
void scores_of_block(const float* q, int size, const E* key, int block, int used, float* out) {
  for (int at = 0; at < used; at += 2 * LANES) {
    vec acc[T][2] = {};
    for (int d = 0; d < size; ++d) {
      const vec a = load(key + (int64_t)d * block + at), b = load(key + (int64_t)d * block + at + LANES);
      for (int i = 0; i < T; ++i) {
        acc[i][0] += q[i * size + d] * a;
        acc[i][1] += q[i * size + d] * b;
      }
    }
    for (int i = 0; i < T; ++i) std::memcpy(out + i * block + at, acc[i], sizeof acc[i]);
  }
}

// Cap scores [T][block].
template <int T>
void cap_scores(float cap, float* scores, int block, int used) {
  for (int i = 0; i < T; ++i)
    for (int j = 0; j < used; j += LANES) {
      const vec v = cap * tanh_vec(load(scores + i * block + j) * (1.0f / cap));
      std::memcpy(scores + i * block + j, &v, sizeof v);
    }
}

// Turn scores [T][block] into weights in place and fold their maximum and sum into the running softmax.
template <int T>
void weigh(Softmax* soft, float* scores, float* acc, int size, int block, int used) {
  const int padded = (used + LANES - 1) / LANES * LANES;
  for (int i = 0; i < T; ++i) {
    float* row = scores + i * block;
    for (int j = used; j < padded; ++j) row[j] = -std::numeric_limits<float>::infinity();
    vec high = load(row);
    for (int j = LANES; j < padded; j += LANES) { const vec v = load(row + j); high = v > high ? v : high; }
    const float peak = std::max(soft[i].peak, top(high));
    vec total = {};
    for (int j = 0; j < padded; j += LANES) {
      const vec w = exp_vec(load(row + j) - peak);
      std::memcpy(row + j, &w, sizeof w);
      total += w;
    }
    if (peak > soft[i].peak) {
      const float shrink = std::exp(soft[i].peak - peak);
      soft[i] = {peak, soft[i].total * shrink};
      for (int d = 0; d < size; ++d) acc[i * size + d] *= shrink;
    }
    soft[i].total += sum(total);
  }
}

// Add weights [T][stride] times values [used][size] to acc [T][size], W vectors of dimensions at a time.
template <int T, int W, typename E>
void add_values(const float* weights, int stride, const E* value, int size, int used, float* acc) {
  vec sums[T][W];
  for (int i = 0; i < T; ++i)
    for (int w = 0; w < W; ++w) sums[i][w] = load(acc + i * size + w * LANES);
  for (int j = 0; j < used; ++j) {
    vec v[W];
    for (int w = 0; w < W; ++w) v[w] = load(value + (int64_t)j * size + w * LANES);
    for (int i = 0; i < T; ++i)
      for (int w = 0; w < W; ++w) sums[i][w] += weights[i * stride + j] * v[w];
  }
  for (int i = 0; i < T; ++i)
    for (int w = 0; w < W; ++w) std::memcpy(acc + i * size + w * LANES, &sums[i][w], sizeof sums[i][w]);
}

// Attend from T queries to one block that begins at position `begin`; query i sees positions from first_seen[i] on.
template <int T, typename E>
void attend(const float* q, Softmax* soft, float* acc, const E* page, int size, int block, int used, int64_t begin,
            const int64_t* first_seen, float cap, float* scores) {
  scores_of_block<T>(q, size, page, block, used, scores);
  if (cap > 0) cap_scores<T>(cap, scores, block, used);
  for (int i = 0; i < T; ++i)
    for (int j = 0; j < std::min<int64_t>(used, first_seen[i] - begin); ++j)
      scores[i * block + j] = -std::numeric_limits<float>::infinity();
  weigh<T>(soft, scores, acc, size, block, used);
  const E* value = page + (int64_t)block * size;
  int at = 0;
  for (; at + 2 * LANES <= size; at += 2 * LANES) add_values<T, 2>(scores, block, value + at, size, used, acc + at);
  for (; at < size; at += LANES) add_values<T, 1>(scores, block, value + at, size, used, acc + at);
}

// Fold the row's ancestors, one key and value each, into a query; bits stand in order of depth.
template <typename E>
void add_ancestors(Softmax& soft, const float* q, float* acc, uint64_t word, const E* key, const E* value,
                   int64_t key_stride, int64_t value_stride, int size, Scoring scoring) {
  if (scoring.window > 0)
    for (int64_t extra = __builtin_popcountll(word) - scoring.window; extra > 0; --extra) word &= word - 1;
  const float none = -std::numeric_limits<float>::infinity();
  int rows[64], n = 0;
  float weights[64];
  std::fill(weights, weights + 64, none);
  float peak = soft.peak;
  for (; word; word &= word - 1, ++n) {
    rows[n] = __builtin_ctzll(word);
    vec dot = {};
    for (int d = 0; d < size; d += LANES) dot += load(q + d) * load(key + rows[n] * key_stride + d);
    const float raw = sum(dot);
    weights[n] = scoring.cap > 0 ? scoring.cap * std::tanh(raw / scoring.cap) : raw;
    peak = std::max(peak, weights[n]);
  }
  vec total = {};
  for (int i = 0; i < n; i += LANES) {
    const vec w = exp_vec(load(weights + i) - peak);
    std::memcpy(weights + i, &w, sizeof w);
    total += w;
  }
  const float shrink = std::exp(soft.peak - peak);
  soft = {peak, soft.total * shrink + sum(total)};
  for (int d = 0; d < size; d += LANES) {
    vec v = load(acc + d) * shrink;
    for (int i = 0; i < n; ++i) v += weights[i] * load(value + rows[i] * value_stride + d);
    std::memcpy(acc + d, &v, sizeof v);
  }
}

template <typename E>
void run(const E* query, const E* tree_key, const E* tree_value, const E* cache, E* output, const int32_t* query_start,
         const int32_t* num_rows, const int32_t* first_word, const int32_t* key_start, const int32_t* context_len,
         const int32_t* block_table, const int64_t* words, int64_t trees, int64_t table_stride, int64_t heads,
         int64_t kv_heads, int64_t size, int64_t block, int64_t query_stride, int64_t key_stride, int64_t value_stride,
         int64_t output_stride, float scale, Scoring scoring) {
  const int64_t group = heads / kv_heads;
  int64_t queries = 0;
  for (int64_t r = 0; r < trees; ++r) queries += num_rows[r] * heads;
  // Long spans read less, short ones keep every thread busy.
  const int64_t share = queries / (4 * omp_get_max_threads()) / TILE * TILE;
  const int64_t span = std::min<int64_t>(SPAN, std::max<int64_t>(TILE, share));
  struct Task { int32_t tree, head, first; };
  std::vector<Task> tasks;
  for (int64_t r = 0; r < trees; ++r)
    for (int64_t g = 0; g < kv_heads; ++g)
      for (int64_t first = 0; first < num_rows[r] * group; first += span)
        tasks.push_back({(int32_t)r, (int32_t)g, (int32_t)first});
#pragma omp parallel
  {
    std::vector<float> q(span * size), acc(span * size), scores(TILE * block);
    std::vector<Softmax> soft(span);
    std::vector<int64_t> first_seen(span); // of the context, by query
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < (int64_t)tasks.size(); ++t) {
      const int64_t r = tasks[t].tree, g = tasks[t].head, first = tasks[t].first;
      const int count = (int)std::min<int64_t>(span, num_rows[r] * group - first);
      std::fill(q.begin(), q.end(), 0.0f);
      std::fill(acc.begin(), acc.end(), 0.0f);
      std::fill(soft.begin(), soft.end(), Softmax{-1e30f, 0.0f});
      std::fill(first_seen.begin(), first_seen.end(), 0);
      int64_t from_block = 0;
      if (scoring.window > 0) {
        for (int i = 0; i < count; ++i) { // a row stands behind the context and its ancestors
          const int depth = __builtin_popcountll((uint64_t)words[first_word[r] + (first + i) / group]) - 1;
          first_seen[i] = std::max<int64_t>(0, context_len[r] + depth + 1 - scoring.window);
        }
        // blocks before the window may be another request's by now
        from_block = *std::min_element(first_seen.begin(), first_seen.begin() + count) / block * block;
      }
      for (int i = 0; i < count; ++i) { // query i of the task: row (first + i) / group, head g * group + (first + i) % group
        const E* from = query + (query_start[r] + (first + i) / group) * query_stride + (g * group + (first + i) % group) * size;
        for (int d = 0; d < size; d += LANES) {
          const vec v = load(from + d) * scale;
          std::memcpy(&q[i * size + d], &v, sizeof v);
        }
      }
      for (int64_t at = from_block; at < context_len[r]; at += block) {
        const int used = (int)std::min<int64_t>(block, context_len[r] - at);
        const E* page = cache + (block_table[r * table_stride + at / block] * kv_heads + g) * block * 2 * size;
        for (int i = 0; i < count; i += TILE) {
          float *mine = &q[i * size], *into = &acc[i * size];
          if (count - i > TILE / 2)
            attend<TILE>(mine, &soft[i], into, page, (int)size, (int)block, used, at, &first_seen[i], scoring.cap, scores.data());
          else
            attend<TILE / 2>(mine, &soft[i], into, page, (int)size, (int)block, used, at, &first_seen[i], scoring.cap, scores.data());
        }
      }
      for (int i = 0; i < count; ++i) {
        const int64_t row = (first + i) / group, head = g * group + (first + i) % group;
        float* mine = &acc[i * size];
        add_ancestors(soft[i], &q[i * size], mine, (uint64_t)words[first_word[r] + row],
                      tree_key + key_start[r] * key_stride + g * size, tree_value + key_start[r] * value_stride + g * size,
                      key_stride, value_stride, (int)size, scoring);
        const float inverse = 1.0f / soft[i].total;
        for (int d = 0; d < size; ++d) mine[d] *= inverse;
        store(output + (query_start[r] + row) * output_stride + head * size, mine, (int)size);
      }
    }
  }
}

}  // namespace

#define TREE_ATTENTION(NAME, E)                                                                                       \
  extern "C" void NAME(const void* q, const void* tk, const void* tv, const void* cache, void* out, const int32_t* qs, \
                       const int32_t* n, const int32_t* fw, const int32_t* ks, const int32_t* ctx, const int32_t* bt, \
                       const int64_t* words, int64_t trees, int64_t table_stride, int64_t heads, int64_t kv_heads,     \
                       int64_t size, int64_t block, int64_t q_stride, int64_t k_stride, int64_t v_stride,              \
                       int64_t o_stride, float scale, int64_t window, float cap) {                                     \
    run((const E*)q, (const E*)tk, (const E*)tv, (const E*)cache, (E*)out, qs, n, fw, ks, ctx, bt, words, trees,       \
        table_stride, heads, kv_heads, size, block, q_stride, k_stride, v_stride, o_stride, scale, {window, cap});     \
  }
TREE_ATTENTION(tree_attention_float32, float)
TREE_ATTENTION(tree_attention_bfloat16, bf16)
TREE_ATTENTION(tree_attention_float16, f16)
