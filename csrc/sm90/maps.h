// Tensor maps: how the tensor copies of the kernels see matrices in memory. All are encoded by the
// host; see the CUDA driver API, cuTensorMapEncodeTiled.
#ifndef MOK_SM90_MAPS_H_
#define MOK_SM90_MAPS_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace mok::sm90 {

struct DeviceFree {
  void operator()(void* p) const { cudaFree(p); }
};
using DeviceMemory = std::unique_ptr<void, DeviceFree>;
DeviceMemory device_alloc(int64_t bytes);

// BF16 matrix of `rows` x `columns` in boxes of `box_rows` x 64 columns, 128-byte swizzle. 2-D:
// (column, row).
CUtensorMap make_matrix_map(const void* data, int64_t rows, int64_t columns, int32_t box_rows);

// The same matrix as column blocks of 64, in boxes of `box_rows` rows of `box_blocks` column
// blocks, one block after the other. 3-D: (column in its block, row, column block). Such a box is
// an operand whose K are the columns (one block) or the rows (several).
CUtensorMap make_block_map(const void* data, int64_t rows, int64_t columns, int32_t box_rows,
                           int32_t box_blocks);

// FC1's weight [2F, H], gate rows, then up rows, in boxes of 64 of H and 128 of F of both, clipped
// at F. 3-D: (column, row, 0).
CUtensorMap make_fc1_map(const void* data, int64_t hidden, int64_t ffn);

// FP32 gradient of `rows` x `columns` in boxes of 16 rows x 32 columns, 128-byte swizzle. In shared
// memory rows 4 .. 7 of 8 lie between rows 0 .. 3, which spares bank conflicts when accumulators
// are written there. 5-D: (0, 0, 0, row / 8, column / 32).
CUtensorMap make_grad_map(const void* data, int64_t rows, int64_t columns);

// Arrays of maps in device memory, each made once for a set of matrices.
class MapSets {
 public:
  // Takes memory for some sets of `maps` maps, so that calls need none.
  void reserve(size_t maps);

  // The set for `key`. `make()` encodes it if there is none yet, and it is copied on `stream`.
  template <typename Make>
  const CUtensorMap* find(std::vector<const void*> key, cudaStream_t stream, const Make& make) {
    const auto found = sets_.find(key);
    if (found != sets_.end()) return found->second;
    const std::vector<CUtensorMap> maps = make();
    return add(std::move(key), maps, stream);
  }

 private:
  const CUtensorMap* add(std::vector<const void*> key, const std::vector<CUtensorMap>& maps,
                         cudaStream_t stream);

  std::map<std::vector<const void*>, const CUtensorMap*> sets_;
  std::vector<DeviceMemory> slabs_;
  CUtensorMap* next_ = nullptr;  // free part of the last slab
  size_t left_ = 0;
};

// Before the first launch on a device: loads what MapSets launches.
cudaError_t load_map_kernels();

}  // namespace mok::sm90

#endif  // MOK_SM90_MAPS_H_
