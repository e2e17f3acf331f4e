// Answers torch's C++ for an imagined card: the card is there, and one of its streams is current.
#pragma once

#include <string>

namespace pytracer::imagined {

// Whether a Guard exists for the calling thread.
bool is_imagining();

// Why a Guard cannot answer for CUDA; empty if it can.
std::string problem_with_hooks();

// While one exists, the calling thread may compute on fake tensors of CUDA, with or without a CUDA
// device: a backward pass asks for the device's streams. Other threads see their device as it is.
class Guard {
 public:
  Guard();
  ~Guard();
  Guard(const Guard&) = delete;  // the registry has one entry
  Guard& operator=(const Guard&) = delete;
};

}  // namespace pytracer::imagined
