#ifndef OPTSTATE_KERNELS_WRITE_BACK_H_
#define OPTSTATE_KERNELS_WRITE_BACK_H_

#include "kernels/update_kernel.h"

namespace optstate::kernels {

// Puts the new values of a view, which another device has computed, in the
// place of the old ones: elements [to.begin, to.numel) of the parameter, the
// master and the states. Both views have the formats of `key`, and `from` the
// elements of `to`; gradients are not looked at.
//
// With `to.undo` it stores what a kernel of the key does, in the order of
// undo.h: the old values of 64 elements (of a block, with kDynamic8), the
// progress that names them, the new values. So RollBack() restores what is in
// flight, and the CPU's kernel goes on from there, whose bits are those of
// every device: a process that looks after this one's death cannot tell which
// of the two wrote. There is no xor, also where the key's kernel keeps one: the
// phase is kOldValues, which each kernel's RollBack() knows.
//
// Threads: pure, as the kernels.
void WriteBack(const UpdateKernelKey& key, const TileView& from,
               const TileView& to);

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_WRITE_BACK_H_
