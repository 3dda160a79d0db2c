// What needs a Hopper GPU (cuda/gemm_tile*.cu, gemm_many*.cu, gemm_lowrank.cu, norm_mix_decode_team.cu,
// quantize_rows.cu, decode_row.cu): nothing here calls it.
#include "../cuda/decode_row_input.cuh"
#include "../cuda/gemm.cuh"
#include "../cuda/gemm_tile.cuh"
#include "../cuda/norm.cuh"

bool suits_team(const NormInput&, int) { return false; }

int norm_mix_team(const NormInput&, int, const int*, __half*, size_t, const __half*, int, __half*,
                  const Fp8Rows&, cudaStream_t) {
    return cudaErrorNotSupported;
}

extern "C" {
int rwkv_gemm_tile(const void* const*, const void* const*, void* const*, int, int, int, int, int, int,
                   const TileShape*, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_gemm_many(const void* const*, const void* const*, void* const*, int, int, int, int, int, int,
                   const TileShape*, const GemmPart*, int, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_gemm_tile8(const void* const*, const void* const*, const void* const*, void* const*, int, int, int,
                    int, int, int, int, const TileShape*, const GemmPart*, int, const char*, unsigned,
                    cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_gemm_tile4(const void* const*, const void* const*, void* const*, int, int, int, int, int, int,
                    const TileShape*, const GemmPart*, int, const char*, unsigned, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_gemm_tile_fp8(const void* const*, const void* const*, const void* const*, const void* const*,
                       void* const*, int, int, int, int, int, const TileShape*, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_gemm_many8(const void* const*, const void* const*, const void* const*, void* const*, int, int, int,
                    int, int, int, const TileShape*, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_gemm_many4(const void* const*, const void* const*, void* const*, int, int, int, int, int, int,
                    const TileShape*, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_gemm_many_fp8(const void* const*, const void* const*, const void* const*, const void* const*,
                       void* const*, int, int, int, int, int, const TileShape*, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_quantize_rows(const __half*, uint8_t*, float*, int, int, int, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_gemm_lowrank(const GemmPart*, int, int, int, const char*, unsigned, cudaStream_t) {
    return cudaErrorNotSupported;
}

int rwkv_decode_row_fits(int, const int*, int, int, int) { return 0; }

int rwkv_decode_row(const RowInput*, cudaStream_t) { return cudaErrorNotSupported; }
}
