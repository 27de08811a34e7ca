/* Whether this processor, and its operating system, have the instructions that kernels were compiled with. Names are
 * LLVM's. A name that is not in the tables is an instruction that this machine is taken to lack. */
#include <string.h>

#include "runtime.h"

#if defined(__x86_64__)
#include <cpuid.h>

enum { EAX, EBX, ECX, EDX };
struct feature {
  const char* name;
  unsigned leaf, subleaf, word, bit, state; /* state: bits of XCR0 that the system must have set */
};
enum { VECTORS = 0x6, WIDE = 0xE6, MORE_REGISTERS = 1 << 19 };

static const struct feature features[] = {
    {"sse3", 1, 0, ECX, 0, 0},           {"ssse3", 1, 0, ECX, 9, 0},
    {"sse4.1", 1, 0, ECX, 19, 0},        {"sse4.2", 1, 0, ECX, 20, 0},
    {"crc32", 1, 0, ECX, 20, 0},
    {"movbe", 1, 0, ECX, 22, 0},         {"popcnt", 1, 0, ECX, 23, 0},
    {"fma", 1, 0, ECX, 12, VECTORS},     {"avx", 1, 0, ECX, 28, VECTORS},
    {"f16c", 1, 0, ECX, 29, VECTORS},    {"sse", 1, 0, EDX, 25, 0},
    {"sse2", 1, 0, EDX, 26, 0},          {"bmi", 7, 0, EBX, 3, 0},
    {"avx2", 7, 0, EBX, 5, VECTORS},     {"bmi2", 7, 0, EBX, 8, 0},
    {"avx512f", 7, 0, EBX, 16, WIDE},    {"avx512dq", 7, 0, EBX, 17, WIDE},
    {"avx512ifma", 7, 0, EBX, 21, WIDE}, {"avx512cd", 7, 0, EBX, 28, WIDE},
    {"avx512bw", 7, 0, EBX, 30, WIDE},   {"avx512vl", 7, 0, EBX, 31, WIDE},
    {"avx512vbmi", 7, 0, ECX, 1, WIDE},  {"avx512vbmi2", 7, 0, ECX, 6, WIDE},
    {"gfni", 7, 0, ECX, 8, 0},           {"vaes", 7, 0, ECX, 9, VECTORS},
    {"vpclmulqdq", 7, 0, ECX, 10, VECTORS}, {"avx512vnni", 7, 0, ECX, 11, WIDE},
    {"avx512bitalg", 7, 0, ECX, 12, WIDE}, {"avx512vpopcntdq", 7, 0, ECX, 14, WIDE},
    {"avx512vp2intersect", 7, 0, EDX, 8, WIDE}, {"avx512fp16", 7, 0, EDX, 23, WIDE},
    {"avxvnni", 7, 1, EAX, 4, VECTORS},  {"avx512bf16", 7, 1, EAX, 5, WIDE},
    {"avxifma", 7, 1, EAX, 23, VECTORS}, {"avxvnniint8", 7, 1, EDX, 4, VECTORS},
    {"avxneconvert", 7, 1, EDX, 5, VECTORS}, {"avxvnniint16", 7, 1, EDX, 10, VECTORS},
    {"lzcnt", 0x80000001, 0, ECX, 5, 0}, {"sse4a", 0x80000001, 0, ECX, 6, 0},
    {"xop", 0x80000001, 0, ECX, 11, VECTORS}, {"fma4", 0x80000001, 0, ECX, 16, VECTORS},
    {"tbm", 0x80000001, 0, ECX, 21, 0},
    /* APX, all of it at once */
    {"egpr", 7, 1, EDX, 21, MORE_REGISTERS}, {"ndd", 7, 1, EDX, 21, MORE_REGISTERS},
    {"ccmp", 7, 1, EDX, 21, MORE_REGISTERS}, {"nf", 7, 1, EDX, 21, MORE_REGISTERS},
    {"ppx", 7, 1, EDX, 21, MORE_REGISTERS}, {"push2pop2", 7, 1, EDX, 21, MORE_REGISTERS},
    {"zu", 7, 1, EDX, 21, MORE_REGISTERS},
    /* the bit says AVX10; `has` reads its version */
    {"avx10.1", 7, 1, EDX, 19, WIDE},    {"avx10.2", 7, 1, EDX, 19, WIDE},
};

/* The bits of XCR0: the registers that the operating system keeps for a thread. */
static unsigned kept(void) {
  unsigned word[4], low, high;
  if (!__get_cpuid(1, &word[EAX], &word[EBX], &word[ECX], &word[EDX]) || !(word[ECX] >> 27 & 1)) return 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

static unsigned version_of_avx10(void) {
  unsigned word[4];
  return __get_cpuid_count(0x24, 0, &word[EAX], &word[EBX], &word[ECX], &word[EDX]) ? word[EBX] & 0xFF : 0;
}

static int has(const char* name) {
  for (size_t i = 0; i < sizeof features / sizeof *features; i++) {
    const struct feature* found = &features[i];
    unsigned word[4];
    if (strcmp(found->name, name) != 0) continue;
    if (!__get_cpuid_count(found->leaf, found->subleaf, &word[EAX], &word[EBX], &word[ECX], &word[EDX])) return 0;
    if (strncmp(name, "avx10.", 6) == 0 && version_of_avx10() < (unsigned)(name[6] - '0')) return 0;
    return (word[found->word] >> found->bit & 1) && (kept() & found->state) == found->state;
  }
  return 0;
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

struct feature {
  const char* name;
  unsigned long vector; /* of the auxiliary vector: 16 is AT_HWCAP, 26 is AT_HWCAP2 */
  unsigned bit;
};

static const struct feature features[] = {
    {"fp-armv8", 16, 0},   {"neon", 16, 1},      {"crc", 16, 7},        {"lse", 16, 8},      {"fullfp16", 16, 10},
    {"rdm", 16, 12},       {"jsconv", 16, 13},   {"complxnum", 16, 14}, {"rcpc", 16, 15},    {"sha3", 16, 17},
    {"dotprod", 16, 20},   {"sve", 16, 22},      {"fp16fml", 16, 23},   {"lse2", 16, 25},    {"rcpc-immo", 16, 26},
    {"flagm", 16, 27},     {"sve2p2", 16, 41},   {"sve2", 26, 1},       {"sve-aes", 26, 2},  {"sve-bitperm", 26, 4},
    {"sve-sha3", 26, 5},   {"sve-sm4", 26, 6},   {"altnzcv", 26, 7},    {"fptoint", 26, 8},  {"i8mm", 26, 13},
    {"bf16", 26, 14},      {"cssc", 26, 34},     {"sve2p1", 26, 36},    {"mops", 26, 43},    {"hbc", 26, 44},
    {"sve-b16b16", 26, 45}, {"rcpc3", 26, 46},   {"lse128", 26, 47},    {"faminmax", 26, 50},
};

static int has(const char* name) {
  for (size_t i = 0; i < sizeof features / sizeof *features; i++) {
    if (strcmp(features[i].name, name) == 0) return getauxval(features[i].vector) >> features[i].bit & 1;
  }
  return 0;
}

#else
#error "libraries of kernels are for x86-64 and aarch64"
#endif

int xrlflow_runs_here(void) {
  for (const char* const* name = xrlflow_features; *name != NULL; name++) {
    if (!has(*name)) return 0;
  }
  return 1;
}
