#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "attention/attention_cache.h"
#include "attention/attention_work.h"
#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/sizes.h"

namespace pagemill {
namespace attention_detail {

// The units of layers of one shape.
struct Work {
  int64_t num_heads, num_kv_heads, head_dim, window, threads;
  std::vector<Unit> units;   // what threads take, one after the other
  std::vector<Unit> merges;  // units whose parts are merged afterwards
  int64_t parts_floats = 0;  // units hold offsets into the parts until memory is known
  int64_t rows = 0;          // of the largest unit
};

}  // namespace attention_detail

namespace {

using namespace attention_detail;

constexpr const char* kOp = "attention";
// Units a thread: enough to even out what the machine does besides.
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kFewRows = 12;
// Small units are taken so many at once, but at least so many times a thread.
constexpr int64_t kMostAtOnce = 8, kTimes = 16;
// Parts of cut units, at most: rows beyond it are work enough for all threads without cutting.
constexpr int64_t kPartsFloats = int64_t{8} << 20;
// Fewer new numbers than this are written to the cache before other threads are woken.
constexpr int64_t kSerialWrite = 1 << 14;

using Getter = const Kernels* (*)();
constexpr Table<Getter> kFloats = {
    {portable_f32, PAGEMILL_IF_AVX2(avx2_f32), PAGEMILL_IF_AVX512(avx512_f32), nullptr, nullptr}};
constexpr Table<Getter> kPairs = {
    {portable_bf16, PAGEMILL_IF_AVX2(avx2_bf16), PAGEMILL_IF_AVX512(avx512_bf16), nullptr, nullptr}};
constexpr Table<Getter> kCodes = {
    {portable_int8, PAGEMILL_IF_AVX2(avx2_int8), PAGEMILL_IF_AVX512(avx512_int8), nullptr, nullptr}};
constexpr Table<Getter> kCodeDots = {{portable_int8, PAGEMILL_IF_AVX2(avx2_int8),
                                      PAGEMILL_IF_AVX512(avx512_int8),
                                      PAGEMILL_IF_AVX512_BF16(avx512_int8_pairs), nullptr}};
// Where queries too are bfloat16.
constexpr Table<Getter> kDots = {{portable_bf16, PAGEMILL_IF_AVX2(avx2_bf16),
                                  PAGEMILL_IF_AVX512(avx512_bf16),
                                  PAGEMILL_IF_AVX512_BF16(avx512_bf16_pairs), nullptr}};

const Kernels& choose(const Layer& layer) {
  if (layer.cache_dtype == Dtype::float32) return *pick(kFloats)();
  if (layer.cache_dtype == Dtype::int8)
    return *pick(layer.q_dtype == Dtype::float32 ? kCodes : kCodeDots)();
  return *pick(layer.q_dtype == Dtype::float32 ? kPairs : kDots)();
}

Dtype dtype_of(int number, const char* argument) {
  check(number == 0 || number == 1, kOp, argument, "must be 0 (float32) or 1 (bfloat16)");
  return static_cast<Dtype>(number);
}

Dtype cache_dtype_of(int number) {
  return number == 2 ? Dtype::int8 : dtype_of(number, "the cache");
}

// The units of a step, those with most keys first in each sequence.
class Planner {
 public:
  Planner(const AttentionPlan& plan, Work& work) : plan_(plan), work_(work) {}

  void build() {
    int64_t rows = kMaxUnitRows;
    while (work_.threads > 1 && rows > kFewRows && count(rows) < kUnitsPerThread * work_.threads)
      rows /= 2;
    for (int64_t seq = 0; seq < plan_.num_seqs(); ++seq) add_sequence(seq, rows);
    if (work_.threads > 1) cut();
  }

 private:
  int64_t group() const { return work_.num_heads / work_.num_kv_heads; }
  int64_t rows_of(int64_t seq) const {
    return (plan_.starts[seq + 1] - plan_.starts[seq]) * group();
  }

  int64_t count(int64_t rows) const {
    int64_t units = 0;
    for (int64_t seq = 0; seq < plan_.num_seqs(); ++seq)
      units += ceil_div(rows_of(seq), rows) * work_.num_kv_heads;
    return units;
  }

  void add_sequence(int64_t seq, int64_t most) {
    const int64_t rows = rows_of(seq), tiles = ceil_div(rows, most);
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {
      Unit unit{};
      unit.blocks = plan_.tables + seq * plan_.table_width;
      unit.token = plan_.starts[seq];
      unit.position = plan_.computed[seq];
      unit.first_row = rows * tile / tiles;
      unit.rows = rows * (tile + 1) / tiles - unit.first_row;
      const int64_t first = unit.position + unit.first_row / group();
      const int64_t last = unit.position + (unit.first_row + unit.rows - 1) / group();
      const int64_t seen = work_.window > 0 ? std::max<int64_t>(0, first + 1 - work_.window) : 0;
      unit.first_segment = seen / kSegmentKeys;
      unit.last_segment = last / kSegmentKeys + 1;
      work_.rows = std::max(work_.rows, unit.rows);
      for (unit.kv_head = 0; unit.kv_head < work_.num_kv_heads; ++unit.kv_head)
        work_.units.push_back(unit);
    }
  }

  static int64_t cost(const Unit& unit) {
    return unit.rows * (unit.last_segment - unit.first_segment);
  }

  // Cut units by segments where there are too few for all threads.
  void cut() {
    int64_t total = 0;
    for (const Unit& unit : work_.units) total += cost(unit);
    const int64_t fair = std::max<int64_t>(1, total / (kUnitsPerThread * work_.threads));
    const int64_t part = kPartValues + ceil_div(work_.head_dim, 16) * 16;
    std::vector<Unit> units;
    units.reserve(work_.units.size());
    for (Unit unit : work_.units) {
      const int64_t segments = unit.last_segment - unit.first_segment;
      const int64_t pieces = std::min(segments, cost(unit) / fair);
      const int64_t floats = unit.rows * segments * part;
      if (pieces < 2 || work_.parts_floats + floats > kPartsFloats) {
        units.push_back(unit);
        continue;
      }
      // An offset for now; never null.
      unit.parts = reinterpret_cast<float*>((work_.parts_floats + 1) * sizeof(float));
      unit.part_segment = unit.first_segment;
      unit.part_segments = segments;
      work_.parts_floats += floats;
      work_.merges.push_back(unit);
      const int64_t start = unit.first_segment;
      for (int64_t piece = 0; piece < pieces; ++piece) {
        unit.first_segment = start + segments * piece / pieces;
        unit.last_segment = start + segments * (piece + 1) / pieces;
        units.push_back(unit);
      }
    }
    work_.units = std::move(units);
  }

  const AttentionPlan& plan_;
  Work& work_;
};

Work& work_for(AttentionPlan& plan, const Layer& layer) {
  const int64_t threads = num_threads();
  for (const auto& work : plan.works)
    if (work->num_heads == layer.num_heads && work->num_kv_heads == layer.num_kv_heads &&
        work->head_dim == layer.head_dim && work->window == layer.window &&
        work->threads == threads)
      return *work;
  auto work = std::make_unique<Work>();
  work->num_heads = layer.num_heads;
  work->num_kv_heads = layer.num_kv_heads;
  work->head_dim = layer.head_dim;
  work->window = layer.window;
  work->threads = threads;
  Planner(plan, *work).build();
  plan.works.push_back(std::move(work));
  return *plan.works.back();
}

// The unit with its parts' true address.
Unit placed(Unit unit, float* parts) {
  if (unit.parts != nullptr)
    unit.parts = parts + reinterpret_cast<uintptr_t>(unit.parts) / sizeof(float) - 1;
  return unit;
}

// Run `run` on all units, some at a time by the next thread that is free; no result hangs on which.
// `early`: a thread takes its next ones while it has one left, and knows what to fetch.
void run_units(const Layer& layer, const std::vector<Unit>& units, float* parts, char* scratch,
               int64_t thread_bytes, bool early,
               void (*run)(const Layer&, const Unit&, const Unit*, char*)) {
  const int64_t count = static_cast<int64_t>(units.size());
  if (count == 0) return;
  const int64_t threads = std::min<int64_t>(num_threads(), count);
  const int64_t batch = std::clamp<int64_t>(early ? count / (kTimes * threads) : 1, 1, kMostAtOnce);
  std::atomic<int64_t> taken{0};
  parallel_for(threads, 1, [&](int64_t thread, int64_t) {
    char* own = scratch + thread * thread_bytes;
    int64_t start = taken.fetch_add(batch);
    while (start < count) {
      const int64_t end = std::min(start + batch, count);
      int64_t following = count;
      for (int64_t i = start; i < end; ++i) {
        int64_t next = i + 1;
        if (next == end && early) next = following = taken.fetch_add(batch);
        const Unit* coming =
            early && next < count ? &units[static_cast<size_t>(next)] : nullptr;
        run(layer, placed(units[static_cast<size_t>(i)], parts), coming, own);
      }
      start = early ? following : taken.fetch_add(batch);
    }
  });
}

void check_layer(const Layer& layer, const AttentionPlan& plan, int64_t num_blocks) {
  check(layer.num_kv_heads > 0 && layer.num_heads > 0 &&
            layer.num_heads % layer.num_kv_heads == 0,
        kOp, "num_heads", "must be a positive multiple of num_kv_heads");
  check(layer.head_dim > 0, kOp, "head_dim", "must be positive");
  check(layer.window >= 0, kOp, "window", "must not be negative");
  check(layer.softcap >= 0, kOp, "softcap", "must not be negative");
  check(plan.most_block < num_blocks, kOp, "num_blocks",
        "must be more than the highest block of block_tables and slots");
}

}  // namespace

AttentionPlan::AttentionPlan(std::vector<int64_t> query_starts, std::vector<int64_t> num_computed,
                             uintptr_t block_tables, int64_t width, uintptr_t slot_mapping,
                             int64_t size, int64_t number)
    : starts(std::move(query_starts)),
      computed(std::move(num_computed)),
      tables(reinterpret_cast<const int64_t*>(block_tables)),
      table_width(width),
      slots(reinterpret_cast<const int64_t*>(slot_mapping)),
      block_size(size),
      kind(number) {
  check(block_size >= 1, kOp, "block_size", "must be at least 1");
  check(kind >= 0, kOp, "kind", "must not be negative");
  check(starts.size() == computed.size() + 1 && starts.front() == 0, kOp, "query_starts",
        "must be 0 and the end of each sequence");
  for (int64_t seq = 0; seq < num_seqs(); ++seq) {
    const int64_t queries = starts[seq + 1] - starts[seq];
    check(queries >= 0, kOp, "query_starts", "must not fall");
    check(computed[seq] >= 0, kOp, "num_computed", "must not be negative");
    if (queries == 0) continue;
    const int64_t blocks = ceil_div(computed[seq] + queries, block_size);
    check(blocks <= table_width, kOp, "block_tables", "must have a block for every token");
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t block = tables[seq * table_width + i];
      check(block >= 0, kOp, "block_tables", "must not be negative");
      most_block = std::max(most_block, block);
    }
  }
  int64_t most_slot = -1;
  for (int64_t i = 0; i < num_tokens(); ++i) {
    check(slots[i] >= 0, kOp, "slots", "must not be negative");
    most_slot = std::max(most_slot, slots[i]);
  }
  if (most_slot >= 0) most_block = std::max(most_block, most_slot / block_size);
}

AttentionPlan::~AttentionPlan() = default;

int64_t attention_scratch_bytes(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                int64_t max_tokens, int64_t max_len, int64_t threads) {
  const int64_t part = kPartValues + ceil_div(head_dim, 16) * 16;
  const int64_t rows = max_tokens * num_heads;
  const int64_t parts = std::min(kPartsFloats, rows * (max_len / kSegmentKeys + 2) * part);
  const int64_t unit_rows = std::min<int64_t>(kMaxUnitRows, rows / num_kv_heads);
  return threads * round_up(unit_scratch_bytes(head_dim, unit_rows)) +
         (threads > 1 ? parts * static_cast<int64_t>(sizeof(float)) : 0);
}

int64_t attention(AttentionPlan& plan, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                  float scale, float softcap, int64_t window, int q_dtype, int cache_dtype,
                  uintptr_t q, int64_t q_token, int64_t q_head, uintptr_t k, int64_t k_token,
                  int64_t k_head, uintptr_t v, int64_t v_token, int64_t v_head, uintptr_t k_pool,
                  uintptr_t v_pool, int64_t num_blocks, uintptr_t sinks, uintptr_t out,
                  uintptr_t scratch, int64_t scratch_bytes) {
  Layer layer{};
  layer.num_heads = num_heads;
  layer.num_kv_heads = num_kv_heads;
  layer.head_dim = head_dim;
  layer.block_size = plan.block_size;
  layer.scale = scale;
  layer.softcap = softcap;
  layer.window = window;
  layer.q_dtype = dtype_of(q_dtype, "q");
  layer.cache_dtype = cache_dtype_of(cache_dtype);
  layer.q = reinterpret_cast<const char*>(q);
  layer.q_token = q_token;
  layer.q_head = q_head;
  layer.k_pool = reinterpret_cast<const char*>(k_pool);
  layer.v_pool = reinterpret_cast<const char*>(v_pool);
  layer.sinks = reinterpret_cast<const float*>(sinks);
  layer.out = reinterpret_cast<char*>(out);
  check_layer(layer, plan, num_blocks);
  if (plan.num_tokens() == 0) return 0;

  const Work& work = work_for(plan, layer);
  const int64_t thread_bytes = round_up(unit_scratch_bytes(head_dim, work.rows));
  const int64_t needed =
      work.threads * thread_bytes + work.parts_floats * static_cast<int64_t>(sizeof(float));
  if (needed > scratch_bytes) return needed;

  const Fresh keys{reinterpret_cast<const char*>(k), k_token, k_head};
  const Fresh values{reinterpret_cast<const char*>(v), v_token, v_head};
  const int64_t tokens = plan.num_tokens();
  const bool serial = tokens * num_kv_heads * head_dim < kSerialWrite;
  parallel_for(tokens, serial ? tokens : 1, [&](int64_t first, int64_t last) {
    write_cache(layer, keys, values, reinterpret_cast<char*>(k_pool),
                reinterpret_cast<char*>(v_pool), plan.slots, first, last);
  });
  const Kernels& kernels = choose(layer);
  char* own = reinterpret_cast<char*>(scratch);
  float* parts = reinterpret_cast<float*>(own + work.threads * thread_bytes);
  // With few rows reading is what takes time; with many a unit taken early could be the last one left.
  const bool early = work.rows <= kFewRows;
  run_units(layer, work.units, parts, own, thread_bytes, early, kernels.attend);
  run_units(layer, work.merges, parts, own, thread_bytes, false, kernels.merge);
  return 0;
}

}  // namespace pagemill
