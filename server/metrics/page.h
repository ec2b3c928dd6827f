#ifndef OPTSTATE_SERVER_METRICS_PAGE_H_
#define OPTSTATE_SERVER_METRICS_PAGE_H_

#include "absl/strings/string_view.h"

namespace optstate::metrics {

// Returns the text of page/index.html, which is packed into the binary.
absl::string_view Page();

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_PAGE_H_
