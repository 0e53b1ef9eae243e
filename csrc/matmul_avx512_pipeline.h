// Two panels by many tokens on AVX-512, for 4-bit and 8-bit codes, as a pipeline.
//
// A token goes through a group in five phases: four of dot products, two vectors of codes each, and
// one in which its sums are scaled and put away. Five tokens are under way at a time, each a phase
// behind the one before it, so that every phase has as much of everything to do: whatever few
// instructions the processor looks ahead (half of them where another thread shares the core), both
// multiplying ports find work. Were all five in step, twenty multiplications would wait for each
// other at the end of every five tokens, with nothing else to do. A compiler brings instructions into
// an order of its own, so the phases are in assembly, made by macros of the assembler.
//
// A token under way has a slot, 0 to 4. Registers:
//   zmm0..zmm7; zmm8, zmm9, zmm15..zmm19, zmm25   codes of both panels, by vector
//   zmm1<slot>; zmm2<slot>                        sums of both panels
//   zmm26..zmm29                                  of the last phase
//   zmm31                                         zero
#pragma once

#include <cstddef>
#include <cstdint>

#include "activations.h"

namespace minisgl {
namespace {

// For fewer tokens, filling and draining the pipeline takes longer than it saves; at least 4.
constexpr int64_t kPipelineTokens = 12;
constexpr int32_t kNibble = 0x0f0f0f0f;

// What the tokens of a tile have gathered.
struct PipelineSums {
  alignas(64) int32_t span[kTileTokens][2][kPanelRows];  // with integer scales
  alignas(64) float all[kTileTokens][2][kPanelRows];
};

// One group of columns.
struct GroupStep {
  const uint8_t* codes[2];  // of each panel
  const void* scales[2];    // 16 of 32 bits: scale, and minimum in the upper half; or floats
  const int8_t* x;          // [token][32]
  const int32_t* start;     // [token]: where sums start
  const void* factor;       // [token], integers in both halves; or floats
  const float* unit;        // [token], with integer scales
  PipelineSums* sums;
  const float* weight_unit; // [panel][16], with integer scales
  float* out;               // [token], rows of both panels side by side
  int64_t out_stride;       // bytes
  int64_t tokens;           // kPipelineTokens or more
};

// kFloats: scales are floats, codes have 8 bits; otherwise scales are integers and codes have 4 bits.
// kBegins, kEnds: the group is the first or last of a span (with floats, both). A span that ends is
// added to `all`, or, as the first one, becomes it; the last one goes on to the output.
template <bool kFloats, bool kBegins, bool kEnds, bool kFirst, bool kLast>
__attribute__((noinline)) void run_group(const GroupStep& step) {
  const int8_t* x = step.x;
  const int32_t* start = step.start;
  const void* factor = step.factor;
  const float* unit = step.unit;
  void* sums = step.sums;
  float* out = step.out;
  int64_t left = step.tokens - 4;
  __asm__ volatile(R"(
    .macro mg_unpack panel, line, low, high
      vpandd 64*\line(\panel), %%zmm26, %%zmm\low
      vpsrlw $4, 64*\line(\panel), %%zmm\high
      vpandd %%zmm26, %%zmm\high, %%zmm\high
    .endm
    .macro mg_load panel, line, to
      vmovdqu64 64*\line(\panel), %%zmm\to
    .endm
    # Tokens t count from the pointers.
    .macro mg_start slot, t
      vpbroadcastd 4*(\t)(%[start]), %%zmm1\slot
      vmovdqa64 %%zmm1\slot, %%zmm2\slot
    .endm
    .macro mg_dot slot, t, vector, a, b
      vpdpbusd 32*(\t)+4*\vector(%[x])%{1to16%}, %%zmm\a, %%zmm1\slot
      vpdpbusd 32*(\t)+4*\vector(%[x])%{1to16%}, %%zmm\b, %%zmm2\slot
    .endm
    .macro mg_scale t
      .if %c[floats]
        vbroadcastss 4*(\t)(%[factor]), %%zmm26
        vmulps (%[scale_a]), %%zmm26, %%zmm27
        vmulps (%[scale_b]), %%zmm26, %%zmm26
      .else
        vpbroadcastd 4*(\t)(%[factor]), %%zmm26
        vpmulhrsw (%[scale_a]), %%zmm26, %%zmm27
        vpmulhrsw (%[scale_b]), %%zmm26, %%zmm26
        .if %c[begins]
          vpxord %%zmm28, %%zmm28, %%zmm28
          vpxord %%zmm29, %%zmm29, %%zmm29
        .else
          vmovdqa64 128*(\t)(%[sums]), %%zmm28
          vmovdqa64 128*(\t)+64(%[sums]), %%zmm29
        .endif
      .endif
    .endm
    .macro mg_add slot, t
      .if %c[floats]
        vcvtdq2ps %%zmm1\slot, %%zmm28
        vcvtdq2ps %%zmm2\slot, %%zmm29
      .else
        vpdpwssd %%zmm27, %%zmm1\slot, %%zmm28
        vpdpwssd %%zmm26, %%zmm2\slot, %%zmm29
      .endif
      .if %c[ends]
        .if !%c[floats]
          vbroadcastss 4*(\t)(%[unit]), %%zmm26
          vmovaps %%zmm26, %%zmm27
          vcvtdq2ps %%zmm28, %%zmm28
          vcvtdq2ps %%zmm29, %%zmm29
        .endif
        .if %c[first]
          vfmadd213ps %%zmm31, %%zmm27, %%zmm28
          vfmadd213ps %%zmm31, %%zmm26, %%zmm29
        .else
          vfmadd213ps %c[all]+128*(\t)(%[sums]), %%zmm27, %%zmm28
          vfmadd213ps %c[all]+128*(\t)+64(%[sums]), %%zmm26, %%zmm29
        .endif
        .if %c[last]
          .if !%c[floats]
            vmulps (%[weight_unit]), %%zmm28, %%zmm28
            vmulps 64(%[weight_unit]), %%zmm29, %%zmm29
          .endif
          vmovups %%zmm28, (%[out])
          vmovups %%zmm29, 64(%[out])
          addq %[out_stride], %[out]
        .else
          vmovaps %%zmm28, %c[all]+128*(\t)(%[sums])
          vmovaps %%zmm29, %c[all]+128*(\t)+64(%[sums])
        .endif
      .else
        vmovdqa64 %%zmm28, 128*(\t)(%[sums])
        vmovdqa64 %%zmm29, 128*(\t)+64(%[sums])
      .endif
    .endm
    # Token t starts in slot a, those before it are in b, c and d; the one in e is to be scaled.
    # A point: nobody is there.
    .macro mg_phase t, a=., b=., c=., d=., e=.
      .ifnc \a,.
        mg_start \a, \t
      .endif
      .ifnc \d,.
        mg_dot \d, \t-3, 6, 6, 19
      .endif
      .ifnc \c,.
        mg_dot \c, \t-2, 4, 4, 17
      .endif
      .ifnc \b,.
        mg_dot \b, \t-1, 2, 2, 15
      .endif
      .ifnc \e,.
        mg_scale \t-4
      .endif
      .ifnc \a,.
        mg_dot \a, \t, 0, 0, 8
      .endif
      .ifnc \d,.
        mg_dot \d, \t-3, 7, 7, 25
      .endif
      .ifnc \c,.
        mg_dot \c, \t-2, 5, 5, 18
      .endif
      .ifnc \b,.
        mg_dot \b, \t-1, 3, 3, 16
      .endif
      .ifnc \e,.
        mg_add \e, \t-4
      .endif
      .ifnc \a,.
        mg_dot \a, \t, 1, 1, 9
      .endif
    .endm
    # The last token, t, started in slot a.
    .macro mg_drain t, a, b, c, d
      mg_phase \t+1, ., \a, \b, \c, \d
      mg_phase \t+2, ., ., \a, \b, \c
      mg_phase \t+3, ., ., ., \a, \b
      mg_phase \t+4, ., ., ., ., \a
    .endm

    .if %c[floats]
      .irp v, 0, 1, 2, 3, 4, 5, 6, 7
        mg_load %[a], \v, \v
      .endr
      mg_load %[b], 0, 8
      mg_load %[b], 1, 9
      mg_load %[b], 2, 15
      mg_load %[b], 3, 16
      mg_load %[b], 4, 17
      mg_load %[b], 5, 18
      mg_load %[b], 6, 19
      mg_load %[b], 7, 25
    .else
      vpbroadcastd %[nibble], %%zmm26
      mg_unpack %[a], 0, 0, 4
      mg_unpack %[b], 0, 8, 17
      mg_unpack %[a], 1, 1, 5
      mg_unpack %[b], 1, 9, 18
      mg_unpack %[a], 2, 2, 6
      mg_unpack %[b], 2, 15, 19
      mg_unpack %[a], 3, 3, 7
      mg_unpack %[b], 3, 16, 25
    .endif
    vpxord %%zmm31, %%zmm31, %%zmm31

    mg_phase 0, 0
    mg_phase 1, 1, 0
    mg_phase 2, 2, 1, 0
    mg_phase 3, 3, 2, 1, 0
    subq $5, %[left]
    jl 2f
    .p2align 5
  1:
    mg_phase 4, 4, 3, 2, 1, 0
    mg_phase 5, 0, 4, 3, 2, 1
    mg_phase 6, 1, 0, 4, 3, 2
    mg_phase 7, 2, 1, 0, 4, 3
    mg_phase 8, 3, 2, 1, 0, 4
    addq $5*32, %[x]
    addq $5*4, %[start]
    addq $5*4, %[factor]
    addq $5*4, %[unit]
    addq $5*128, %[sums]
    subq $5, %[left]
    jge 1b
  2:
    # none to four tokens are left: -5 to -1
    cmpq $-4, %[left]
    je 4f
    jg 5f
    mg_drain 3, 3, 2, 1, 0
    jmp 9f
  4:
    mg_phase 4, 4, 3, 2, 1, 0
    mg_drain 4, 4, 3, 2, 1
    jmp 9f
  5:
    mg_phase 4, 4, 3, 2, 1, 0
    mg_phase 5, 0, 4, 3, 2, 1
    cmpq $-2, %[left]
    je 6f
    jg 7f
    mg_drain 5, 0, 4, 3, 2
    jmp 9f
  6:
    mg_phase 6, 1, 0, 4, 3, 2
    mg_drain 6, 1, 0, 4, 3
    jmp 9f
  7:
    mg_phase 6, 1, 0, 4, 3, 2
    mg_phase 7, 2, 1, 0, 4, 3
    mg_drain 7, 2, 1, 0, 4
  9:
    .purgem mg_unpack
    .purgem mg_load
    .purgem mg_start
    .purgem mg_dot
    .purgem mg_scale
    .purgem mg_add
    .purgem mg_phase
    .purgem mg_drain
  )"
                   : [x] "+r"(x), [start] "+r"(start), [factor] "+r"(factor), [unit] "+r"(unit),
                     [sums] "+r"(sums), [out] "+r"(out), [left] "+r"(left)
                   : [a] "r"(step.codes[0]), [b] "r"(step.codes[1]), [scale_a] "r"(step.scales[0]),
                     [scale_b] "r"(step.scales[1]), [weight_unit] "r"(step.weight_unit),
                     [out_stride] "r"(step.out_stride), [nibble] "m"(kNibble), [all] "i"(offsetof(PipelineSums, all)),
                     [floats] "i"(kFloats), [begins] "i"(kBegins), [ends] "i"(kEnds),
                     [first] "i"(kFirst), [last] "i"(kLast)
                   : "memory", "cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6",
                     "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15",
                     "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23",
                     "zmm24", "zmm25", "zmm26", "zmm27", "zmm28", "zmm29", "zmm30", "zmm31");
}

using GroupFn = void (*)(const GroupStep& step);

// The same for what is known only at run time.
template <bool kFloats>
GroupFn group_fn(bool begins, bool ends, bool first, bool last) {
  if constexpr (kFloats) {
    static constexpr GroupFn kFns[] = {
        run_group<true, true, true, false, false>, run_group<true, true, true, true, false>,
        run_group<true, true, true, false, true>, run_group<true, true, true, true, true>};
    return kFns[first + 2 * last];
  } else {
    static constexpr GroupFn kFns[] = {
        run_group<false, false, false, false, false>, run_group<false, true, false, false, false>,
        run_group<false, false, true, false, false>,  run_group<false, true, true, false, false>,
        run_group<false, false, true, true, false>,   run_group<false, true, true, true, false>,
        run_group<false, false, true, false, true>,   run_group<false, true, true, false, true>,
        run_group<false, false, true, true, true>,    run_group<false, true, true, true, true>};
    return kFns[ends ? 2 + begins + 2 * first + 4 * last : begins];
  }
}

}  // namespace
}  // namespace minisgl
