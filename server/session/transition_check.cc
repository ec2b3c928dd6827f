#include "server/session/transition_check.h"

#include <cstdlib>
#include <iostream>

namespace optstate::session {

void AbortTransition(absl::string_view subject, uint64_t number,
                     absl::string_view from, absl::string_view to) {
  std::cerr << "server/session: " << subject << " " << number
            << " cannot go from " << from << " to " << to << std::endl;
  std::abort();
}

}  // namespace optstate::session
