#include <algorithm>
#include <string>

#include "error.h"
#include "launch.cuh"
#include "layout.cuh"
#include "maps.h"

namespace mok::sm90 {

DeviceMemory device_alloc(int64_t bytes) {
  void* p = nullptr;
  check_cuda(cudaMalloc(&p, bytes), "allocating device memory");
  return DeviceMemory(p);
}

namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Looked up at run time, so that the library loads where there is no driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                cudaEnableDefault, &status),
               "looking up cuTensorMapEncodeTiled");
    if (found == nullptr) throw Error{MOK_ERR_SYSTEM, "the driver has no cuTensorMapEncodeTiled"};
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

// Dimensions of a tensor, the fastest first; strides in bytes, that of the first left out.
template <int32_t kRank>
CUtensorMap encode_map(CUtensorMapDataType type, const void* data, const int64_t (&sizes)[kRank],
                       const int64_t (&strides)[kRank - 1], const int32_t (&box)[kRank]) {
  cuuint64_t sizes64[kRank], strides64[kRank - 1];
  cuuint32_t box32[kRank], steps[kRank];
  std::copy_n(sizes, kRank, sizes64);
  std::copy_n(strides, kRank - 1, strides64);
  std::copy_n(box, kRank, box32);
  std::fill_n(steps, kRank, 1);
  CUtensorMap map;
  const CUresult result =
      encode_tiled()(&map, type, kRank, const_cast<void*>(data), sizes64, strides64, box32, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error{MOK_ERR_SYSTEM, "cuTensorMapEncodeTiled failed with CUresult " +
                                    std::to_string(static_cast<int32_t>(result))};
  }
  return map;
}

constexpr CUtensorMapDataType kBf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
constexpr CUtensorMapDataType kF32 = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

// ---- Map sets ----------------------------------------------------------------------------------

// Maps travel as kernel parameters: no synchronisation, and graphs can capture it.
constexpr int32_t kMapsPerLaunch = 60;
struct MapBatch {
  CUtensorMap maps[kMapsPerLaunch];
};

__global__ void copy_maps_kernel(const __grid_constant__ MapBatch batch, int32_t count,
                                 CUtensorMap* to) {
  constexpr int32_t kWords = sizeof(CUtensorMap) / sizeof(uint4);
  const auto* from = reinterpret_cast<const uint4*>(batch.maps);
  for (int32_t i = threadIdx.x; i < count * kWords; i += blockDim.x) {
    reinterpret_cast<uint4*>(to)[i] = from[i];
  }
}

}  // namespace

CUtensorMap make_matrix_map(const void* data, int64_t rows, int64_t columns, int32_t box_rows) {
  return encode_map<2>(kBf16, data, {columns, rows}, {columns * 2}, {kTileK, box_rows});
}

CUtensorMap make_block_map(const void* data, int64_t rows, int64_t columns, int32_t box_rows,
                           int32_t box_blocks) {
  return encode_map<3>(kBf16, data, {kBoxColumns, rows, columns / kBoxColumns},
                       {columns * 2, kBoxColumns * 2}, {kBoxColumns, box_rows, box_blocks});
}

CUtensorMap make_fc1_map(const void* data, int64_t hidden, int64_t ffn) {
  return encode_map<3>(kBf16, data, {hidden, ffn, 2}, {hidden * 2, hidden * ffn * 2},
                       {kTileK, kTileF, 2});
}

CUtensorMap make_grad_map(const void* data, int64_t rows, int64_t columns) {
  const int64_t pitch = columns * 4;
  return encode_map<5>(kF32, data, {32, 2, 4, rows / 8, columns / 32},
                       {4 * pitch, pitch, 8 * pitch, 32 * 4}, {32, 2, 4, 2, 1});
}

cudaError_t load_map_kernels() { return load_kernels(copy_maps_kernel); }

void MapSets::reserve(size_t maps) {
  constexpr size_t kSets = 16;
  left_ = kSets * maps;
  slabs_.push_back(device_alloc(static_cast<int64_t>(left_ * sizeof(CUtensorMap))));
  next_ = static_cast<CUtensorMap*>(slabs_.back().get());
}

const CUtensorMap* MapSets::add(std::vector<const void*> key, const std::vector<CUtensorMap>& maps,
                                cudaStream_t stream) {
  constexpr size_t kMaxSets = 1024;  // matrices that keep moving must not fill the memory
  if (sets_.size() >= kMaxSets) {
    check_cuda(cudaDeviceSynchronize(), "waiting before old tensor maps are freed");
    sets_.clear();
    slabs_.clear();
    left_ = 0;
  }
  if (left_ < maps.size()) reserve(maps.size());
  CUtensorMap* const set = next_;
  next_ += maps.size();
  left_ -= maps.size();
  for (size_t first = 0; first < maps.size(); first += kMapsPerLaunch) {
    MapBatch batch;
    const size_t count = std::min<size_t>(kMapsPerLaunch, maps.size() - first);
    std::copy_n(maps.begin() + static_cast<int64_t>(first), count, batch.maps);
    copy_maps_kernel<<<1, 256, 0, stream>>>(batch, static_cast<int32_t>(count), set + first);
    check_cuda(cudaGetLastError(), "copying tensor maps");
  }
  return sets_.emplace(std::move(key), set).first->second;
}

}  // namespace mok::sm90
