#ifndef OPTSTATE_SERVER_SCHEDULER_TILE_VIEW_H_
#define OPTSTATE_SERVER_SCHEDULER_TILE_VIEW_H_

#include <cstdint>

#include "kernels/update_kernel.h"
#include "proto/types/layout.h"
#include "storage/record_view.h"

namespace optstate::scheduler {

// Sets the addresses of elements [begin, +numel) of a parameter in a record,
// and leaves the rest of the view alone.
inline void SetTileView(const Layout& layout, const storage::RecordView& record,
                        uint32_t parameter, uint64_t begin, uint64_t numel,
                        kernels::TileView* view) {
  view->parameter = record.parameter(parameter, begin);
  view->master = record.master(parameter, begin);
  for (int k = 0; k < kStateArraysMax; ++k) {
    view->state[k] = record.state(k, parameter, begin);
    view->scale[k] = record.scale(k, parameter, begin);
  }
  view->numel = numel;
  view->flat_begin = layout.flat_offset(parameter) + begin;
}

// Returns a view with these addresses, without gradients.
inline kernels::TileView TileViewOf(const Layout& layout,
                                    const storage::RecordView& record,
                                    uint32_t parameter, uint64_t begin,
                                    uint64_t numel) {
  kernels::TileView view;
  SetTileView(layout, record, parameter, begin, numel, &view);
  return view;
}

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_TILE_VIEW_H_
