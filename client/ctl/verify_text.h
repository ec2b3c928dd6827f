#ifndef OPTSTATE_CLIENT_CTL_VERIFY_TEXT_H_
#define OPTSTATE_CLIENT_CTL_VERIFY_TEXT_H_

#include <string>

#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// Texts of a verification for people; one line each, without its end.

// Says how far it has come, how fast it is, and how long it will take.
std::string VerifyProgressText(const std::string& job,
                               const v1::VerifyJobProgress& progress,
                               absl::Duration elapsed);
// Names the file, the offset, the tile and the parameters.
std::string DamageText(const v1::RecordDamage& damage);
std::string VerifyResultText(const std::string& job,
                             const v1::VerifyJobProgress& progress,
                             absl::Duration elapsed);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_VERIFY_TEXT_H_
