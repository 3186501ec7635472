#include "checks.h"
#include "embedding/embedding.h"

namespace driver {

void check_embedding(Digest& digest) {
  const Array table(1, 11 * 37, 1);
  const std::vector<int64_t> ids{10, 0, 3, 3};
  for (const int threads : {1, 2}) {
    pagemill::set_num_threads(threads);
    Array out(1, 4 * 37);
    pagemill::embedding(reinterpret_cast<uintptr_t>(ids.data()), 4, table.address(), 11, 74,
                        out.address());
    for (size_t i = 0; i < ids.size(); ++i)
      require(out.same(table, static_cast<int64_t>(i) * 37, ids[i] * 37, 37),
              "embedding: another row");
    digest.add(out.data(), static_cast<size_t>(out.bytes()));
  }
}

}  // namespace driver
