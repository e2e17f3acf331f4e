// Shared by the fuzz targets: checks, and a main() for builds without a fuzzer.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Independent of NDEBUG, and visible to the fuzzer.
inline void require(bool condition) {
  if (!condition) {
    std::abort();
  }
}

template <typename Item>
void require_below(const std::vector<Item>& ids, size_t limit) {
  for (Item id : ids) {
    require(id < limit);
  }
}

#ifndef PYTRACER_FUZZ

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

// Replays the files of folders.
int main(int argc, char** argv) {
  int replayed = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++replayed;
    }
  }
  std::cerr << replayed << " files replayed\n";
  return replayed > 0 ? 0 : 1;
}

#endif
