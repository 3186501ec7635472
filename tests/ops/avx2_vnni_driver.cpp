// Compares the sums of the avx2_vnni kernels with the portable ones over random blocks. Built by
// test_linear_int8_avx2_vnni.py for AVX-512's form of the byte product, where a machine lacks the other.
#include <cstdio>
#include <random>
#include <vector>

#include "linear_int8/linear_int8_kernels.h"

using namespace pagemill::linear_int8_detail;

int main() {
  const Kernels *ours = avx2_vnni_kernels(), *plain = portable_kernels();
  std::mt19937 random(1);
  std::uniform_int_distribution<int> any(0, 255);
  int blocks = 0;
  for (int m = 1; m <= ours->alone_rows; ++m) {
    for (int k_tiles = 1; k_tiles < 6; ++k_tiles) {
      const int k = k_tiles * 64;
      std::vector<char> b(static_cast<size_t>(k_tiles) * kTileBytes);
      std::vector<int8_t> codes(static_cast<size_t>(m) * k);
      for (char& x : b) x = static_cast<char>(any(random));
      for (int8_t& x : codes) x = static_cast<int8_t>(any(random));
      std::vector<int16_t> words(codes.size());
      for (size_t i = 0; i < codes.size(); i += 4) {
        words[i] = codes[i];
        words[i + 1] = codes[i + 2];
        words[i + 2] = codes[i + 1];
        words[i + 3] = codes[i + 3];
      }
      for (bool accumulate : {false, true}) {
        std::vector<int32_t> c(static_cast<size_t>(m) * kTile, 5), d = c;
        Block block{reinterpret_cast<const char*>(codes.data()), k, b.data(), 0, k_tiles, c.data(),
                    kTile, accumulate, 0, 0, 0};
        ours->micro[m][1](block);
        for (int i = 0; i < m; ++i) {
          Block one{reinterpret_cast<const char*>(words.data() + i * k), 2 * k, b.data(), 0, k_tiles,
                    d.data() + i * kTile, kTile, accumulate, 0, 0, 0};
          plain->micro[1][1](one);
        }
        if (c != d) return std::printf("sums differ: %d rows, %d tiles\n", m, k_tiles), 1;
        ++blocks;
      }
    }
  }
  std::printf("%d blocks agree\n", blocks);
  return 0;
}
