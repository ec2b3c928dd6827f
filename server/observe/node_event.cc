#include "server/observe/node_event.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/observe/event_log.h"

namespace optstate::observe {

void NoteNodeEvent(v1::EventSeverity severity, absl::string_view kind,
                   absl::string_view text, absl::string_view actor) {
  v1::Event event;
  event.set_severity(severity);
  event.set_kind(std::string(kind));
  event.set_text(std::string(text));
  event.set_actor(std::string(actor));
  Events().Add(std::move(event));
}

std::string ActorName(uid_t uid) { return absl::StrCat("uid ", uid); }

}  // namespace optstate::observe
