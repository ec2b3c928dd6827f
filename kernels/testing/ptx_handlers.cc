// The instructions, one function each. Source: NVIDIA's PTX ISA, version 9.0,
// "Instruction Set".

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "kernels/testing/ptx_module.h"
#include "kernels/testing/ptx_thread.h"

namespace optstate::kernels::testing {
namespace {

using Handlers = std::unordered_map<std::string, PtxHandler>;

// An operation whose result is NaN gives this one.
template <class T>
T Canonical(T value) {
  if constexpr (std::is_same_v<T, float>) {
    constexpr uint32_t kNan = 0x7fffffff;
    if (std::isnan(value)) std::memcpy(&value, &kNan, sizeof(value));
  }
  return value;
}

template <class T, T (*kDo)(T)>
void Unary(const PtxInstruction& i, PtxThread* t) {
  t->Write<T>(i.operands[0], kDo(t->Read<T>(i.operands[1])));
}
template <class T, T (*kDo)(T, T)>
void Binary(const PtxInstruction& i, PtxThread* t) {
  t->Write<T>(i.operands[0],
              kDo(t->Read<T>(i.operands[1]), t->Read<T>(i.operands[2])));
}
template <class T, bool (*kDo)(T, T)>
void Compare(const PtxInstruction& i, PtxThread* t) {
  t->Write<uint64_t>(
      i.operands[0],
      kDo(t->Read<T>(i.operands[1]), t->Read<T>(i.operands[2])) ? 1 : 0);
}
template <class To, class From>
void Convert(const PtxInstruction& i, PtxThread* t) {
  t->Write<To>(i.operands[0],
               Canonical<To>(static_cast<To>(t->Read<From>(i.operands[1]))));
}
template <class To, class From>
void MultiplyWide(const PtxInstruction& i, PtxThread* t) {
  t->Write<To>(i.operands[0],
               static_cast<To>(t->Read<From>(i.operands[1])) *
                   static_cast<To>(t->Read<From>(i.operands[2])));
}
template <class T>
void MultiplyAdd(const PtxInstruction& i, PtxThread* t) {
  t->Write<T>(i.operands[0], static_cast<T>(t->Read<T>(i.operands[1]) *
                                                t->Read<T>(i.operands[2]) +
                                            t->Read<T>(i.operands[3])));
}
template <class T>
void DivideInteger(const PtxInstruction& i, PtxThread* t) {
  const T divisor = t->Read<T>(i.operands[2]);
  // A device gives a value that is defined nowhere.
  if (divisor == 0) return t->Fail("a division by zero");
  t->Write<T>(i.operands[0],
              static_cast<T>(t->Read<T>(i.operands[1]) / divisor));
}
template <class T>
void Select(const PtxInstruction& i, PtxThread* t) {
  t->Write<T>(i.operands[0], t->Read<uint64_t>(i.operands[3]) != 0
                                 ? t->Read<T>(i.operands[1])
                                 : t->Read<T>(i.operands[2]));
}
template <class T>
void Load(const void* from, const PtxInstruction& i, PtxThread* t) {
  if (from == nullptr) return;
  T value;
  std::memcpy(&value, from, sizeof(T));
  t->Write<T>(i.operands[0], value);
}
template <class T>
void LoadGlobal(const PtxInstruction& i, PtxThread* t) {
  Load<T>(t->Global(i.operands[1], sizeof(T)), i, t);
}
template <class T>
void LoadShared(const PtxInstruction& i, PtxThread* t) {
  Load<T>(t->Shared(i.operands[1], sizeof(T)), i, t);
}
// A vector is in registers that stand before the address.
template <class T, size_t kLanes>
void LoadLanes(const void* from, const PtxInstruction& i, PtxThread* t) {
  if (from == nullptr) return;
  T lanes[kLanes];
  std::memcpy(lanes, from, sizeof(lanes));
  for (size_t k = 0; k < kLanes; ++k) t->Write<T>(i.operands[k], lanes[k]);
}
template <class T, size_t kLanes>
void LoadVector(const PtxInstruction& i, PtxThread* t) {
  LoadLanes<T, kLanes>(t->Global(i.operands[kLanes], kLanes * sizeof(T)), i, t);
}
template <class T, size_t kLanes>
void LoadSharedVector(const PtxInstruction& i, PtxThread* t) {
  LoadLanes<T, kLanes>(t->Shared(i.operands[kLanes], kLanes * sizeof(T)), i, t);
}
template <class T, size_t kLanes>
void StoreVector(const PtxInstruction& i, PtxThread* t) {
  void* const to = t->Global(i.operands[0], kLanes * sizeof(T));
  if (to == nullptr) return;
  T lanes[kLanes];
  for (size_t k = 0; k < kLanes; ++k) lanes[k] = t->Read<T>(i.operands[k + 1]);
  std::memcpy(to, lanes, sizeof(lanes));
}
template <class T>
void Store(void* to, const PtxInstruction& i, const PtxThread* t) {
  if (to == nullptr) return;
  const T value = t->Read<T>(i.operands[1]);
  std::memcpy(to, &value, sizeof(T));
}
template <class T>
void StoreGlobal(const PtxInstruction& i, PtxThread* t) {
  Store<T>(t->Global(i.operands[0], sizeof(T)), i, t);
}
template <class T>
void StoreShared(const PtxInstruction& i, PtxThread* t) {
  Store<T>(t->Shared(i.operands[0], sizeof(T)), i, t);
}
template <class T>
void LoadParameter(const PtxInstruction& i, PtxThread* t) {
  t->Write<T>(i.operands[0], static_cast<T>(t->argument(i.operands[1])));
}
void RaiseShared(const PtxInstruction& i, PtxThread* t) {
  void* const place = t->Shared(i.operands[1], sizeof(int32_t));
  if (place == nullptr) return;
  int32_t before;
  std::memcpy(&before, place, sizeof(before));
  const int32_t after = std::max(before, t->Read<int32_t>(i.operands[2]));
  std::memcpy(place, &after, sizeof(after));
  t->Write<int32_t>(i.operands[0], before);
}

template <class T>
T Add(T a, T b) {
  return Canonical<T>(a + b);
}
template <class T>
T Subtract(T a, T b) {
  return Canonical<T>(a - b);
}
template <class T>
T Multiply(T a, T b) {
  return Canonical<T>(a * b);
}
template <class T>
T Divide(T a, T b) {
  return Canonical<T>(a / b);
}
template <class T>
T Root(T a) {
  return Canonical<T>(std::sqrt(a));
}
template <class T>
T Reciprocal(T a) {
  return Canonical<T>(T{1} / a);
}
template <class T>
T Smaller(T a, T b) {
  return std::min(a, b);
}
template <class T>
T Larger(T a, T b) {
  return std::max(a, b);
}
// A number wins against NaN, and 0 against -0.
template <class T>
T LargerNumber(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return std::max(a, b);
}
template <class T>
T And(T a, T b) {
  return static_cast<T>(a & b);
}
template <class T>
T Or(T a, T b) {
  return static_cast<T>(a | b);
}
template <class T>
T Xor(T a, T b) {
  return static_cast<T>(a ^ b);
}
template <class T>
T Not(T a) {
  return static_cast<T>(~a);
}
template <class T>
T Same(T a) {
  return a;
}
float Magnitude(float a) { return std::fabs(a); }
double Magnitude(double a) { return std::fabs(a); }
float Negative(float a) { return -a; }
// The least integer is its own opposite: done without a sign, it may wrap.
template <class T>
T Opposite(T a) {
  return static_cast<T>(T{0} - a);
}
float WithSignOf(float sign, float a) { return std::copysign(a, sign); }

// Shifts by more than the width leave nothing, or the sign.
template <class T>
void ShiftLeft(const PtxInstruction& i, PtxThread* t) {
  const auto by = t->Read<uint32_t>(i.operands[2]);
  const T value = t->Read<T>(i.operands[1]);
  t->Write<T>(i.operands[0],
              by < 8 * sizeof(T) ? static_cast<T>(value << by) : T{0});
}
template <class T>
void ShiftRight(const PtxInstruction& i, PtxThread* t) {
  const uint32_t by =
      std::min<uint32_t>(t->Read<uint32_t>(i.operands[2]), 8 * sizeof(T));
  const T value = t->Read<T>(i.operands[1]);
  const T half = static_cast<T>(value >> (by / 2));
  t->Write<T>(i.operands[0], static_cast<T>(half >> (by - by / 2)));
}

template <class T, class Relation>
bool Ordered(T a, T b) {
  return Relation()(a, b);
}
template <class T, class Relation>
bool Unordered(T a, T b) {
  return std::isnan(a) || std::isnan(b) || Relation()(a, b);
}
template <class T>
bool AreNumbers(T a, T b) {
  return !std::isnan(a) && !std::isnan(b);
}
template <class T>
bool AreDifferentNumbers(T a, T b) {
  return AreNumbers(a, b) && a != b;
}
template <class T>
bool HaveNan(T a, T b) {
  return !AreNumbers(a, b);
}

template <class T>
void AddOrder(const std::string& type, Handlers* handlers) {
  (*handlers)["setp.eq" + type] = Compare<T, Ordered<T, std::equal_to<T>>>;
  (*handlers)["setp.ne" + type] = Compare<T, Ordered<T, std::not_equal_to<T>>>;
  (*handlers)["setp.lt" + type] = Compare<T, Ordered<T, std::less<T>>>;
  (*handlers)["setp.le" + type] = Compare<T, Ordered<T, std::less_equal<T>>>;
  (*handlers)["setp.gt" + type] = Compare<T, Ordered<T, std::greater<T>>>;
  (*handlers)["setp.ge" + type] = Compare<T, Ordered<T, std::greater_equal<T>>>;
}

template <class T>
void AddMemory(const std::string& type, Handlers* handlers) {
  for (const char* space : {"ld", "ld.global", "ld.global.nc"}) {
    (*handlers)[space + type] = LoadGlobal<T>;
    (*handlers)[space + (".v2" + type)] = LoadVector<T, 2>;
    (*handlers)[space + (".v4" + type)] = LoadVector<T, 4>;
  }
  for (const char* space : {"st", "st.global"}) {
    (*handlers)[space + type] = StoreGlobal<T>;
    (*handlers)[space + (".v2" + type)] = StoreVector<T, 2>;
    (*handlers)[space + (".v4" + type)] = StoreVector<T, 4>;
  }
  (*handlers)["ld.shared" + type] = LoadShared<T>;
  (*handlers)["ld.param" + type] = LoadParameter<T>;
  (*handlers)["st.shared" + type] = StoreShared<T>;
}

template <class T>
void AddBits(const std::string& type, Handlers* handlers) {
  (*handlers)["mov" + type] = Unary<T, Same<T>>;
  (*handlers)["selp" + type] = Select<T>;
  (*handlers)["and" + type] = Binary<T, And<T>>;
  (*handlers)["or" + type] = Binary<T, Or<T>>;
  (*handlers)["xor" + type] = Binary<T, Xor<T>>;
  (*handlers)["not" + type] = Unary<T, Not<T>>;
  (*handlers)["shl" + type] = ShiftLeft<T>;
  (*handlers)["shr" + type] = ShiftRight<T>;
}

// Arithmetic is done without a sign: the bits are the same, and it may wrap.
template <class T>
void AddInteger(const std::string& type, Handlers* handlers) {
  using Bits = std::make_unsigned_t<T>;
  (*handlers)["mov" + type] = Unary<T, Same<T>>;
  (*handlers)["selp" + type] = Select<T>;
  (*handlers)["add" + type] = Binary<Bits, Add<Bits>>;
  (*handlers)["sub" + type] = Binary<Bits, Subtract<Bits>>;
  (*handlers)["mul.lo" + type] = Binary<Bits, Multiply<Bits>>;
  (*handlers)["mad.lo" + type] = MultiplyAdd<Bits>;
  (*handlers)["min" + type] = Binary<T, Smaller<T>>;
  (*handlers)["max" + type] = Binary<T, Larger<T>>;
  (*handlers)["shr" + type] = ShiftRight<T>;
  AddOrder<T>(type, handlers);
  AddMemory<T>(type, handlers);
}

template <class T>
void AddFloat(const std::string& type, Handlers* handlers) {
  (*handlers)["mov" + type] = Unary<T, Same<T>>;
  (*handlers)["selp" + type] = Select<T>;
  (*handlers)["add.rn" + type] = Binary<T, Add<T>>;
  (*handlers)["sub.rn" + type] = Binary<T, Subtract<T>>;
  (*handlers)["mul.rn" + type] = Binary<T, Multiply<T>>;
  (*handlers)["div.rn" + type] = Binary<T, Divide<T>>;
  (*handlers)["sqrt.rn" + type] = Unary<T, Root<T>>;
  (*handlers)["rcp.rn" + type] = Unary<T, Reciprocal<T>>;
  (*handlers)["abs" + type] = Unary<T, Magnitude>;
  AddOrder<T>(type, handlers);
  (*handlers)["setp.ne" + type] = Compare<T, AreDifferentNumbers<T>>;
  (*handlers)["setp.num" + type] = Compare<T, AreNumbers<T>>;
  (*handlers)["setp.nan" + type] = Compare<T, HaveNan<T>>;
  (*handlers)["setp.equ" + type] = Compare<T, Unordered<T, std::equal_to<T>>>;
  (*handlers)["setp.neu" + type] =
      Compare<T, Unordered<T, std::not_equal_to<T>>>;
  (*handlers)["setp.ltu" + type] = Compare<T, Unordered<T, std::less<T>>>;
  (*handlers)["setp.leu" + type] = Compare<T, Unordered<T, std::less_equal<T>>>;
  (*handlers)["setp.gtu" + type] = Compare<T, Unordered<T, std::greater<T>>>;
  (*handlers)["setp.geu" + type] =
      Compare<T, Unordered<T, std::greater_equal<T>>>;
  AddMemory<T>(type, handlers);
}

Handlers MakeHandlers() {
  Handlers handlers;
  AddBits<uint16_t>(".b16", &handlers);
  AddBits<uint32_t>(".b32", &handlers);
  AddBits<uint64_t>(".b64", &handlers);
  AddBits<uint64_t>(".pred", &handlers);
  AddMemory<uint8_t>(".u8", &handlers);
  AddMemory<int8_t>(".s8", &handlers);
  AddInteger<uint16_t>(".u16", &handlers);
  AddInteger<int16_t>(".s16", &handlers);
  AddInteger<uint32_t>(".u32", &handlers);
  AddInteger<int32_t>(".s32", &handlers);
  AddInteger<uint64_t>(".u64", &handlers);
  AddInteger<int64_t>(".s64", &handlers);
  AddFloat<float>(".f32", &handlers);
  AddFloat<double>(".f64", &handlers);
  // A predicate is 0 or 1.
  handlers["not.pred"] = [](const PtxInstruction& i, PtxThread* t) {
    t->Write<uint64_t>(i.operands[0],
                       t->Read<uint64_t>(i.operands[1]) == 0 ? 1 : 0);
  };
  handlers["neg.f32"] = Unary<float, Negative>;
  handlers["neg.s64"] = Unary<uint64_t, Opposite<uint64_t>>;
  handlers["max.f64"] = Binary<double, LargerNumber<double>>;
  handlers["div.u32"] = DivideInteger<uint32_t>;
  handlers["div.u64"] = DivideInteger<uint64_t>;
  handlers["copysign.f32"] = Binary<float, WithSignOf>;
  handlers["mul.wide.u16"] = MultiplyWide<uint32_t, uint16_t>;
  handlers["mul.wide.u32"] = MultiplyWide<uint64_t, uint32_t>;
  handlers["mul.wide.s32"] = MultiplyWide<int64_t, int32_t>;
  handlers["cvt.u32.u16"] = Convert<uint32_t, uint16_t>;
  handlers["cvt.u16.u32"] = Convert<uint16_t, uint32_t>;
  handlers["cvt.u64.u32"] = Convert<uint64_t, uint32_t>;
  handlers["cvt.u32.u64"] = Convert<uint32_t, uint64_t>;
  handlers["cvt.s16.s8"] = Convert<int16_t, int8_t>;
  handlers["cvt.s32.s8"] = Convert<int32_t, int8_t>;
  handlers["cvt.s32.s16"] = Convert<int32_t, int16_t>;
  handlers["cvt.rn.f32.s32"] = Convert<float, int32_t>;
  handlers["cvt.rn.f32.s16"] = Convert<float, int16_t>;
  handlers["cvt.f64.f32"] = Convert<double, float>;
  // The CPU rounds to nearest even, unless it has been told otherwise.
  handlers["cvt.rn.f32.f64"] = Convert<float, double>;
  handlers["cvt.rn.f64.u64"] = Convert<double, uint64_t>;
  // Addresses are those of one process.
  handlers["cvta.to.global.u64"] = Unary<uint64_t, Same<uint64_t>>;
  handlers["atom.shared.max.s32"] = RaiseShared;
  handlers["ld.shared.v2.f32"] = LoadSharedVector<float, 2>;
  handlers["bar.sync"] = [](const PtxInstruction& i, PtxThread* t) {
    // A second operand is the number of threads that it waits for.
    if (i.operands.size() != 1) return t->Fail("a barrier of some threads");
    t->WaitAtBarrier();
  };
  handlers["ret"] = [](const PtxInstruction&, PtxThread* t) { t->End(); };
  return handlers;
}

}  // namespace

PtxHandler FindPtxHandler(absl::string_view name) {
  static const Handlers* const handlers = new Handlers(MakeHandlers());
  const auto found = handlers->find(std::string(name));
  return found == handlers->end() ? nullptr : found->second;
}

}  // namespace optstate::kernels::testing
