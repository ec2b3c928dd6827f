#ifndef OPTSTATE_TESTS_CRASH_CRASH_LAYOUT_H_
#define OPTSTATE_TESTS_CRASH_CRASH_LAYOUT_H_

#include "proto/types/layout.h"
#include "tests/crash/scenario.h"

namespace optstate::crash {

// Makes up to three groups with options of the optimizer; a few large
// parameters and many small ones of awkward sizes, vectors and matrices.
LayoutSpec MakeLayout(const Scenario& scenario);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_CRASH_LAYOUT_H_
