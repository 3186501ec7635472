#include "checks.h"
#include "limits/limits.h"

namespace driver {

void check_limits(Digest& digest) {
  for (const size_t words : {size_t{3}, size_t{32}, size_t{545}, size_t{5029}}) {
    std::vector<uint64_t> memory(words);
    const uintptr_t from = reinterpret_cast<uintptr_t>(memory.data());
    const int64_t bytes = static_cast<int64_t>(words) * 8;
    uint64_t sum = 0;
    for (size_t i = 0; i < words; ++i) sum += memory[i] = i * 0x9e3779b97f4a7c15ull;
    for (const int threads : {1, 2}) {
      pagemill::set_num_threads(threads);
      require(pagemill::read_memory(from, bytes) == sum, "read_memory skips words");
    }
    std::vector<int64_t> order(words / 8);  // backwards, in pieces of one line
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(order.size() - 1 - i);
    const uintptr_t numbers = reinterpret_cast<uintptr_t>(order.data());
    uint64_t in_pieces = 0;  // words behind the last whole line are in none
    for (size_t i = 0; i < order.size() * 8; ++i) in_pieces += memory[i];
    require(pagemill::read_pieces(from, 64, numbers, static_cast<int64_t>(order.size())) == in_pieces,
            "read_pieces skips words");
    digest.add(&sum, sizeof sum);
  }
  for (const int dtype : {0, 1})
    require(pagemill::peak_flops(dtype, 10) > 0, "peak_flops does nothing");
}

}  // namespace driver
