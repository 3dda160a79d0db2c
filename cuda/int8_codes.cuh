// Bytes that are 128 more than a whole number, as fp16, exactly: 1024 + byte in the digits of an fp16, less
// 1152.
#pragma once
#include "common.cuh"

// Which two bytes of a word become the halves of a pair.
constexpr int LOW_BYTES = 0x4140, HIGH_BYTES = 0x4342, EVEN_BYTES = 0x4240, ODD_BYTES = 0x4341;

// What they are put among: the bits of 1024, of unknown value to the compiler. A constant would take the
// place in the instruction that the choice of bytes needs.
DEVICE uint32_t code_bits() { return shuffle(0x64646464, 0); }

template <int BYTES>
DEVICE uint32_t halves_of_codes(uint32_t word, uint32_t bits) {
    const uint32_t pair = __byte_perm(word, bits, BYTES);
    const __half2 bias = __half2half2(__ushort_as_half(0x6480));  // 1152
    const __half2 numbers = __hsub2(reinterpret_cast<const __half2&>(pair), bias);
    return reinterpret_cast<const uint32_t&>(numbers);
}
