#ifndef OPTSTATE_KERNELS_GOLDEN_BITS_H_
#define OPTSTATE_KERNELS_GOLDEN_BITS_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate::kernels {

// Hashes of parameters and states after some steps (golden_bits_test.cc). When
// a rule's arithmetic is changed on purpose, copy what the failing test prints.
inline constexpr size_t kGoldenColumns = 6;

struct GoldenRow {
  absl::string_view name;
  // Element-wise rules: float32, bfloat16, float16 and split parameters, then
  // bfloat16 and 8-bit states. Whole parameters: two shapes. Reduce: dtypes.
  uint64_t hash[kGoldenColumns];
};

inline constexpr GoldenRow kGolden[] = {
    {"Adam",
     {0xc6f56d4df1cb62a7, 0xc183ad2bf3b7faa5, 0xf545b29bfb245295,
      0xb0b2c6abe17777d9, 0xb6e10c126bfdd73b, 0x10bbcbf4f060fa55}},
    {"AdamAmsgrad",
     {0xa60f033e6b8fee10, 0x6e558de7fcf42434, 0x1f9183518a0fbbf5,
      0x5525d3d618e18f45, 0x095c9fce9f64d538, 0x9edaa517abdeccf8}},
    {"Adamw",
     {0xfb8435b6bddc9503, 0x54b6f332eb8e1289, 0xecde272bb9fd3051,
      0x9a19ed06b4b2c085, 0x902746d93589eb21, 0xc7a903e0e3b04100}},
    {"AdamwAmsgrad",
     {0x2cb1fe0638320a54, 0x009b611a4aaade51, 0x095d00845fc554f4,
      0x4b7d907ba7eddd87, 0x9d20092afa344195, 0x0cd19f73bd47d480}},
    {"Sgd",
     {0x66ae7220eab8fda1, 0x772fdca72f3636cc, 0xd60e91aa19cad25b,
      0xdb9fe35a69640a1b, 0x772fdca72f3636cc, 0x772fdca72f3636cc}},
    {"SgdMomentum",
     {0x6a46615dbebc7ecc, 0xb57515e97a5a37d9, 0xadff83824145b9ed,
      0xe72b4005bfc0fbf6, 0x032c84be21714b74, 0xd298df65cb6acf97}},
    {"Adagrad",
     {0xb54dda2cbd99bd80, 0x7474871983bcb82c, 0x0f769548ef3459ff,
      0xfb38d80d66574e91, 0x8be3f2c2a145fa39, 0x987a73605b89b3bd}},
    {"Rmsprop",
     {0x0961bba04547ad94, 0x3b1174ecf704b65f, 0xd5acc47916d04293,
      0xa6b2bb8322121455, 0x7f12bb5ec72a2bff, 0xd25565b8e9ea4c16}},
    {"RmspropMomentum",
     {0xee5b1bfe13e5a879, 0x193261c098282645, 0x42bb4a15f2383aa1,
      0xd39a34e986a44555, 0x43f770b6ba658b1b, 0x2293a29e7320dd9e}},
    {"RmspropCentered",
     {0xf808470d9ccaa9c2, 0x736191afa98e8c7b, 0xbf812ed7b14b9c84,
      0xd3cdbd063f5b5c6c, 0x0f4567384d3cc796, 0xf20d91ca7e96e253}},
    {"RmspropMomentumCentered",
     {0x66bee21514c866c5, 0x0f1cac050fb5f3ce, 0x3968260e9ce30fce,
      0xad6f4f9f79e96052, 0x6e6b23122c4294a2, 0x8710c6ab306b8883}},
    {"Lion",
     {0xcebf2b6f5b3b1fbc, 0xbf1e4a6e52955206, 0x951c827b05080ffc,
      0x413d019950a96d85, 0x4bbb7a43d4d335ce, 0x15a0790347fc1f54}},
    {"Nadam",
     {0xca09748517909760, 0xbc1c3e89f4838d66, 0xd3b69f08a945e9a4,
      0x9e28b160306ca5a8, 0x2246c7b8956eb74b, 0xaadb3fb8a67cb1e1}},
    {"Radam",
     {0xd3b412672c17a2a5, 0x8ef055780684c407, 0x9ff5bfe2e2746be7,
      0xa85f267d1a93bb1a, 0xc67ecaea9f27c7fe, 0x76ee52aa57ff2946}},
    {"lamb", {0x6ac1ec96ff5c4148, 0x6f245187f2ea3a38}},
    {"adafactor", {0x07169f0d26106936, 0xe87a25fa1c455a2d}},
    {"muon", {0x677f308d1591ea72, 0x2956b5c126295bd4}},
    {"Reduce", {0xa2dc2857e45fe31f, 0x9ef0ce972a94b549, 0xc8fcca98fdae96ab}},
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_GOLDEN_BITS_H_
