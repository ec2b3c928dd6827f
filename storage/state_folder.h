#ifndef OPTSTATE_STORAGE_STATE_FOLDER_H_
#define OPTSTATE_STORAGE_STATE_FOLDER_H_

namespace optstate::storage {

// The state folder, below a job's directory.
inline constexpr char kStateFolder[] = "/state";
// The description file, in the state folder.
inline constexpr char kDescriptionFile[] = "job.binpb";
inline constexpr char kControlFileName[] = "control";
// The note, below a job's directory, that the next engine is to give up the
// state folder and begin with the last durable step on disk.
inline constexpr char kToDurableFile[] = "/to_durable";
// The id of the machine's start in whose memory the state folder was written,
// below a job's directory.
inline constexpr char kBootFile[] = "/boot";

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_STATE_FOLDER_H_
