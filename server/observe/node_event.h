#ifndef OPTSTATE_SERVER_OBSERVE_NODE_EVENT_H_
#define OPTSTATE_SERVER_OBSERVE_NODE_EVENT_H_

#include <sys/types.h>

#include <string>

#include "absl/strings/string_view.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::observe {

// Adds an event of the node to Events(). `kind` and `actor`: see v1::Event.
void NoteNodeEvent(v1::EventSeverity severity, absl::string_view kind,
                   absl::string_view text, absl::string_view actor = "");

// Names a user as the actor of an event: "uid 1000".
std::string ActorName(uid_t uid);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_NODE_EVENT_H_
