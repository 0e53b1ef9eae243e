// Instruction sets: which kernels this machine can run, and which of them is in force.
//
// Every kernel family is a table with one entry per Isa. The entry is chosen at run time, so a
// library built on one machine runs on any other of the same architecture.
#pragma once

namespace minisgl {

enum class Isa : int { kPortable = 0, kNeon = 1, kAvx2 = 2, kAvxVnni = 3, kAvx512 = 4 };
constexpr int kNumIsas = 5;

// True if this processor and operating system can run kernels of this kind.
bool isa_available(Isa isa);

// The set in force: the best available one until set_isa() chooses another.
Isa current_isa();

// Returns false, and changes nothing, if the machine cannot run it.
bool set_isa(Isa isa);

const char* isa_name(Isa isa);

// Returns false if the name is unknown.
bool isa_from_name(const char* name, Isa* isa);

}  // namespace minisgl
