// A cuBLASLt without a card. cuDNN asks it for the algorithms of a product before it offers engines
// that use it. If it has none, cuDNN also leaves out other engines, as those of Winograd and
// Fourier. So each product has one algorithm here, which takes nothing.
//
// The library is loaded under cuBLASLt's name, in the process that asks cuDNN, and nowhere else.
#include <cstddef>
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kDone = 0, kUnsupported = 15;
constexpr int kMostWorkspace = 1;  // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
constexpr int64_t kNotAsked = -1;

int64_t allowed = kNotAsked;
uint64_t descriptor[64];  // nobody reads one, so one serves for all

struct Algorithm {  // cublasLtMatmulHeuristicResult_t
  uint64_t opaque[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

int clear(void* start, size_t bytes) {
  for (size_t at = 0; at < bytes; at++) {
    static_cast<volatile char*>(start)[at] = 0;
  }
  return kDone;
}

}  // namespace

// The bytes that the last product asked about might have taken. -1: none was asked about since.
EXPORTED int64_t pytracer_allowed() {
  const int64_t last = allowed;
  allowed = kNotAsked;
  return last;
}

EXPORTED size_t cublasLtGetVersion() {
  return 130100;
}

EXPORTED int cublasLtGetProperty(int kind, int* value) {
  const int parts[] = {13, 1, 0};
  *value = kind >= 0 && kind < 3 ? parts[kind] : 0;
  return kDone;
}

EXPORTED int cublasLtCreate(void** handle) {
  *handle = descriptor;
  return kDone;
}

EXPORTED int cublasLtDestroy(void*) {
  return kDone;
}

EXPORTED int cublasLtMatmul() {
  return kUnsupported;
}

EXPORTED int cublasLtMatrixTransform() {
  return kUnsupported;
}

#define DESCRIPTOR(name)                                               \
  EXPORTED int cublasLt##name##Create(void** made) {                   \
    return cublasLtCreate(made);                                       \
  }                                                                    \
  EXPORTED int cublasLt##name##Destroy(void*) {                        \
    return kDone;                                                      \
  }                                                                    \
  EXPORTED int cublasLt##name##Init_internal(void* one, size_t size) { \
    return clear(one, size);                                           \
  }                                                                    \
  EXPORTED int cublasLt##name##GetAttribute(                           \
      void*, int, void* value, size_t size, size_t* written) {         \
    if (written)                                                       \
      *written = size;                                                 \
    return clear(value, size);                                         \
  }

DESCRIPTOR(MatmulDesc)
DESCRIPTOR(MatmulPreference)
DESCRIPTOR(MatrixLayout)
DESCRIPTOR(MatrixTransformDesc)

EXPORTED int cublasLtMatmulDescSetAttribute() {
  return kDone;
}

EXPORTED int cublasLtMatrixLayoutSetAttribute() {
  return kDone;
}

EXPORTED int cublasLtMatrixTransformDescSetAttribute() {
  return kDone;
}

EXPORTED int cublasLtMatmulPreferenceSetAttribute(void*, int name, const void* value, size_t size) {
  if (name == kMostWorkspace && size == sizeof allowed) {
    allowed = *static_cast<const int64_t*>(value);
  }
  return kDone;
}

EXPORTED int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int most, Algorithm* found, int* count) {
  for (int at = 0; at < most; at++) {
    clear(&found[at], sizeof found[at]);
    found[at].waves = 1;
  }
  *count = most;
  return kDone;
}
