#ifndef OPTSTATE_CLIENT_CTL_QUOTA_TEXT_H_
#define OPTSTATE_CLIENT_CTL_QUOTA_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/ctl/table.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// Returns the user's name; a number without a name stays a number.
std::string UserName(const v1::UserUse& user);

// Returns a row for each resource of each user and group of the reply: what is
// used and allowed, the share of that, and the key of the configuration that
// says so.
Table QuotaTable(const v1::ListUsersReply& reply);

// Returns lines about what is behind the table: whom no quota concerns, and how
// a quota is changed.
std::string QuotaNotes(const v1::ListUsersReply& reply);

// Returns UNIMPLEMENTED when the reply lacks what a daemon of this build says:
// an older one takes no notice of which user or group was asked for.
absl::Status CheckTellsKeys(const v1::ListUsersReply& reply);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_QUOTA_TEXT_H_
