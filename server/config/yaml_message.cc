#include "server/config/yaml_message.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <yaml-cpp/yaml.h>

#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/types/status_macros.h"
#include "proto/types/utf8.h"
#include "server/config/yaml_documents.h"

namespace optstate::config {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Returns the prefix omitted from an enum's values: "HugePages" has values
// "HUGE_PAGES_AUTO".
std::string EnumPrefix(const EnumDescriptor& type) {
  std::string prefix;
  for (const char c : type.name()) {
    if (absl::ascii_isupper(c) && !prefix.empty()) prefix += '_';
    prefix += absl::ascii_toupper(c);
  }
  return prefix + "_";
}

std::string EnumWord(const EnumValueDescriptor& value) {
  absl::string_view name = value.name();
  absl::ConsumePrefix(&name, EnumPrefix(*value.type()));
  return absl::AsciiStrToLower(name);
}

std::vector<std::string> EnumWords(const EnumDescriptor& type) {
  std::vector<std::string> words;
  for (int i = 0; i < type.value_count(); ++i) {
    if (type.value(i)->number() != 0) words.push_back(EnumWord(*type.value(i)));
  }
  return words;
}

bool IsByteCount(const FieldDescriptor& field) {
  return absl::StrContains(field.name(), "bytes");
}

bool IsMode(const FieldDescriptor& field) {
  return absl::EndsWith(field.name(), "_mode");
}

absl::StatusOr<uint64_t> ParseOctal(absl::string_view text) {
  uint64_t value = 0;
  if (text.empty() || text.size() > 7) {
    return absl::InvalidArgumentError("expected an octal number, as 0660");
  }
  for (const char c : text) {
    if (c < '0' || c > '7') {
      return absl::InvalidArgumentError("expected an octal number, as 0660");
    }
    value = value * 8 + static_cast<uint64_t>(c - '0');
  }
  return value;
}

absl::StatusOr<uint64_t> ParseUnsigned(const FieldDescriptor& field,
                                       absl::string_view text) {
  if (IsMode(field)) return ParseOctal(text);
  if (IsByteCount(field)) return ParseByteCount(text);
  uint64_t value = 0;
  // A plain number that is too large fails here like any other text.
  if (!absl::SimpleAtoi(text, &value) || text[0] == '+') {
    return absl::InvalidArgumentError("expected a whole number from 0");
  }
  return value;
}

// Reads one YAML document into one message, and records the lines of values.
class Reader {
 public:
  Reader(absl::string_view file, const Descriptor& root, FieldLines* lines)
      : file_(file), root_(&root), lines_(lines) {}

  absl::Status Mapping(const YAML::Node& node, const std::string& path,
                       Message* message) {
    if (node.IsNull()) return absl::OkStatus();
    if (!node.IsMap()) {
      return Error(node, path, "expected keys with values, indented below it");
    }
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) {
        return Error(entry.first, path, "a key must be a word");
      }
      const std::string& key = entry.first.Scalar();
      const std::string full =
          path.empty() ? key : absl::StrCat(path, ".", key);
      const FieldDescriptor* field =
          message->GetDescriptor()->FindFieldByName(key);
      if (field == nullptr) {
        return UnknownKey(entry.first, full, *message->GetDescriptor());
      }
      if (!seen.insert(key).second) {
        return Error(entry.first, full, "is there twice");
      }
      OPTSTATE_RETURN_IF_ERROR(
          Field(entry.first, entry.second, full, *field, message));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Field(const YAML::Node& key, const YAML::Node& node,
                     const std::string& path, const FieldDescriptor& field,
                     Message* message) {
    // The key's line is used: an empty value has the line of the text that
    // follows.
    if (lines_ != nullptr) (*lines_)[path] = key.Mark().line + 1;
    const Reflection& reflection = *message->GetReflection();
    if (field.is_repeated()) return Sequence(node, path, field, message);
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      return Mapping(node, path, reflection.MutableMessage(message, &field));
    }
    if (node.IsNull()) return Error(key, path, "has no value");
    return Scalar(node, path, field, message);
  }

  absl::Status Sequence(const YAML::Node& node, const std::string& path,
                        const FieldDescriptor& field, Message* message) {
    if (!node.IsSequence()) {
      return Error(node, path, "expected a list: [a, b] or lines with \"- \"");
    }
    const Reflection& reflection = *message->GetReflection();
    reflection.ClearField(message, &field);
    int index = 0;
    for (const YAML::Node& element : node) {
      if (lines_ != nullptr) {
        (*lines_)[absl::StrCat(path, "[", index++, "]")] =
            element.Mark().line + 1;
      }
      OPTSTATE_RETURN_IF_ERROR(
          field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE
              ? Mapping(element, path, reflection.AddMessage(message, &field))
              : Scalar(element, path, field, message));
    }
    return absl::OkStatus();
  }

  absl::Status Scalar(const YAML::Node& node, const std::string& path,
                      const FieldDescriptor& field, Message* message) {
    if (!node.IsScalar()) return Error(node, path, "expected a single value");
    const absl::Status status = SetScalar(node.Scalar(), field, message);
    if (status.ok()) return absl::OkStatus();
    return Error(node, path,
                 absl::StrCat("\"", node.Scalar(), "\": ", status.message()));
  }

  static absl::Status SetScalar(const std::string& text,
                                const FieldDescriptor& field,
                                Message* message) {
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        return SetString(text, field, message);
      case FieldDescriptor::CPPTYPE_UINT32:
      case FieldDescriptor::CPPTYPE_UINT64:
        return SetUnsigned(text, field, message);
      case FieldDescriptor::CPPTYPE_ENUM:
        return SetEnum(text, field, message);
      case FieldDescriptor::CPPTYPE_BOOL:
        return SetBool(text, field, message);
      default:
        return absl::UnimplementedError(
            absl::StrCat("no YAML form for type ", field.cpp_type_name()));
    }
  }

  static absl::Status SetString(const std::string& text,
                                const FieldDescriptor& field,
                                Message* message) {
    const Reflection& reflection = *message->GetReflection();
    if (field.is_repeated()) {
      reflection.AddString(message, &field, text);
    } else {
      reflection.SetString(message, &field, text);
    }
    return absl::OkStatus();
  }

  static absl::Status SetBool(const std::string& text,
                              const FieldDescriptor& field, Message* message) {
    if (text != "true" && text != "false") {
      return absl::InvalidArgumentError("expected true or false");
    }
    message->GetReflection()->SetBool(message, &field, text == "true");
    return absl::OkStatus();
  }

  static absl::Status SetUnsigned(const std::string& text,
                                  const FieldDescriptor& field,
                                  Message* message) {
    OPTSTATE_ASSIGN_OR_RETURN(const uint64_t value, ParseUnsigned(field, text));
    const Reflection& reflection = *message->GetReflection();
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_UINT64) {
      if (field.is_repeated()) {
        reflection.AddUInt64(message, &field, value);
      } else {
        reflection.SetUInt64(message, &field, value);
      }
      return absl::OkStatus();
    }
    if (value > std::numeric_limits<uint32_t>::max()) {
      return absl::InvalidArgumentError("is larger than 4294967295");
    }
    if (field.is_repeated()) {
      reflection.AddUInt32(message, &field, static_cast<uint32_t>(value));
    } else {
      reflection.SetUInt32(message, &field, static_cast<uint32_t>(value));
    }
    return absl::OkStatus();
  }

  static absl::Status SetEnum(const std::string& text,
                              const FieldDescriptor& field, Message* message) {
    const EnumDescriptor& type = *field.enum_type();
    for (int i = 0; i < type.value_count(); ++i) {
      if (type.value(i)->number() == 0) continue;
      if (EnumWord(*type.value(i)) != text) continue;
      message->GetReflection()->SetEnum(message, &field, type.value(i));
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("expected one of ", absl::StrJoin(EnumWords(type), ", ")));
  }

  absl::Status UnknownKey(const YAML::Node& key, const std::string& path,
                          const Descriptor& type) {
    std::vector<std::string> known;
    known.reserve(static_cast<size_t>(type.field_count()));
    for (int i = 0; i < type.field_count(); ++i) {
      known.push_back(type.field(i)->name());
    }
    const std::string meant = KnownElsewhere(key.Scalar());
    return absl::InvalidArgumentError(absl::StrCat(
        file_, ":", key.Mark().line + 1, ": unknown key \"", path, "\"",
        meant.empty() ? "" : absl::StrCat(": did you mean ", meant, "?"),
        " (known: ", absl::StrJoin(known, ", "), ")"));
  }

  // Names the places where a key of this name belongs: the key may stand beside
  // its section, or in another.
  std::string KnownElsewhere(const std::string& name) const {
    std::vector<std::string> places;
    FindKey(*root_, "", name, &places);
    return absl::StrJoin(places, " or ");
  }

  static void FindKey(const Descriptor& type, const std::string& path,
                      const std::string& name,
                      std::vector<std::string>* places) {
    for (int i = 0; i < type.field_count(); ++i) {
      const FieldDescriptor& field = *type.field(i);
      const std::string full = absl::StrCat(path, field.name());
      if (field.name() == name) places->push_back(full);
      if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        FindKey(*field.message_type(), full + ".", name, places);
      }
    }
  }

  absl::Status Error(const YAML::Node& node, const std::string& path,
                     absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_, ":", node.Mark().line + 1, ": ", path,
                     path.empty() ? "" : ": ", what));
  }

  const absl::string_view file_;
  const Descriptor* const root_;  // type of the whole document
  FieldLines* const lines_;
};

// Writes the text plain when YAML reads that back unchanged, else in double
// quotes.
std::string YamlString(const std::string& text) {
  YAML::Emitter emitter;
  emitter << YAML::DoubleQuoted << text;
  return emitter.c_str();
}

std::string ScalarText(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return YamlString(reflection.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_UINT32: {
      const uint32_t value = reflection.GetUInt32(message, &field);
      if (!IsMode(field)) return absl::StrCat(value);
      std::string octal;
      for (uint32_t rest = value; rest != 0; rest /= 8) {
        octal.insert(octal.begin(), static_cast<char>('0' + rest % 8));
      }
      return "0" + octal;
    }
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(reflection.GetUInt64(message, &field));
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumWord(*reflection.GetEnum(message, &field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(message, &field) ? "true" : "false";
    default:
      return "";
  }
}

std::string ElementText(const Message& message, const FieldDescriptor& field,
                        int index) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(reflection.GetRepeatedUInt32(message, &field, index));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(reflection.GetRepeatedUInt64(message, &field, index));
    default:
      return YamlString(reflection.GetRepeatedString(message, &field, index));
  }
}

std::string RepeatedText(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  std::vector<std::string> elements;
  elements.reserve(static_cast<size_t>(reflection.FieldSize(message, &field)));
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    elements.push_back(ElementText(message, field, i));
  }
  return absl::StrCat("[", absl::StrJoin(elements, ", "), "]");
}

void AppendYaml(const Message& message, const std::string& indent,
                std::string* out);

// Writes each element's first line behind a dash.
void AppendMessages(const Message& message, const FieldDescriptor& field,
                    const std::string& indent, std::string* out) {
  const Reflection& reflection = *message.GetReflection();
  const int size = reflection.FieldSize(message, &field);
  absl::StrAppend(out, size == 0 ? " []\n" : "\n");
  for (int i = 0; i < size; ++i) {
    std::string element;
    AppendYaml(reflection.GetRepeatedMessage(message, &field, i), indent + "  ",
               &element);
    element[indent.size()] = '-';
    *out += element;
  }
}

void AppendYaml(const Message& message, const std::string& indent,
                std::string* out) {
  const Descriptor& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    absl::StrAppend(out, indent, field.name(), ":");
    const bool is_message =
        field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (field.is_repeated() && is_message) {
      AppendMessages(message, field, indent + "  ", out);
    } else if (field.is_repeated()) {
      absl::StrAppend(out, " ", RepeatedText(message, field), "\n");
    } else if (is_message) {
      absl::StrAppend(out, "\n");
      AppendYaml(message.GetReflection()->GetMessage(message, &field),
                 indent + "  ", out);
    } else {
      absl::StrAppend(out, " ", ScalarText(message, field), "\n");
    }
  }
}

// Returns the number of the first line that a tab indents, from 1; 0: none.
// YAML forbids that, and yaml-cpp's error depends on the following text.
int LineIndentedByTab(absl::string_view text) {
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const size_t begin = line.find_first_not_of(' ');
    if (begin != line.npos && line[begin] == '\t') return number;
  }
  return 0;
}

}  // namespace

absl::Status MergeYaml(absl::string_view text, absl::string_view file,
                       Message* message, FieldLines* lines) {
  // yaml-cpp guesses other encodings.
  if (!IsUtf8(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": is not UTF-8 text: save it as that"));
  }
  try {  // yaml-cpp reports syntax errors in no other way
    const std::vector<YAML::Node> documents = LoadDocuments(std::string(text));
    if (documents.size() > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          file, ":", documents[1].Mark().line + 1,
          ": a second YAML document, after \"---\" or \"...\", which would "
          "not be read: put all keys into one"));
    }
    const YAML::Node root = documents.empty() ? YAML::Node() : documents[0];
    return Reader(file, *message->GetDescriptor(), lines)
        .Mapping(root, "", message);
  } catch (const YAML::Exception& e) {
    const int tab_line = LineIndentedByTab(text);
    const bool is_before = e.mark.is_null() || tab_line <= e.mark.line + 1;
    if (tab_line != 0 && is_before) {
      return absl::InvalidArgumentError(absl::StrCat(
          file, ":", tab_line,
          ": a tab at the beginning of the line: YAML is indented by spaces "
          "alone"));
    }
    return absl::InvalidArgumentError(absl::StrCat(
        file, ":", e.mark.is_null() ? 1 : e.mark.line + 1, ": ", e.msg));
  }
}

std::string ToYaml(const Message& message) {
  std::string out;
  AppendYaml(message, "", &out);
  return out;
}

absl::StatusOr<uint64_t> ParseByteCount(absl::string_view text) {
  static constexpr std::pair<absl::string_view, int> kUnits[] = {
      {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  absl::string_view digits = absl::StripAsciiWhitespace(text);
  int shift = 0;
  for (const auto& [unit, unit_shift] : kUnits) {
    if (absl::ConsumeSuffix(&digits, unit)) shift = unit_shift;
  }
  digits = absl::StripTrailingAsciiWhitespace(digits);
  uint64_t value = 0;
  if (digits.empty() || !absl::ascii_isdigit(digits[0]) ||
      !absl::SimpleAtoi(digits, &value)) {
    return absl::InvalidArgumentError(
        "expected bytes, as 4096, 512MiB, 20GiB (KiB, MiB, GiB, TiB)");
  }
  if (value > (std::numeric_limits<uint64_t>::max() >> shift)) {
    return absl::InvalidArgumentError("is more than 2^64-1 bytes");
  }
  return value << shift;
}

}  // namespace optstate::config
