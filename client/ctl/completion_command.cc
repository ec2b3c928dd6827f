#include <array>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/command.h"

namespace optstate::ctl {
namespace {

constexpr std::array<const char*, 3> kShells = {"bash", "zsh", "fish"};

// One node of the command tree: "get params" and the words that may follow it.
struct Node {
  std::string path;
  std::vector<std::string> words;
  bool takes_job = false;
};

void Collect(const CLI::App& app, const std::string& path,
             std::vector<Node>& nodes) {
  Node node{path, {}, false};
  for (const CLI::App* child :
       app.get_subcommands([](const CLI::App*) { return true; })) {
    node.words.push_back(child->get_name());
    Collect(*child,
            path.empty() ? child->get_name()
                         : absl::StrCat(path, " ", child->get_name()),
            nodes);
  }
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      node.words.push_back("--" + name);
    }
    // Every positional argument is a job's name, except completion's shell and
    // the names of users and groups.
    if (!option->get_positional()) continue;
    if (path == "completion") {
      node.words.insert(node.words.end(), kShells.begin(), kShells.end());
    } else if (path != "get users" && path != "quota") {
      node.takes_job = true;
    }
  }
  nodes.push_back(std::move(node));
}

// The script is one that zsh reads alike. In zsh a variable `path` is $PATH,
// and `:1:C` in an expansion is a modifier.
constexpr char kBash[] =
    R"bash(# bash completion of optctl: source <(optctl completion bash)
_optctl() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
  local verb= word words= job= endpoint= i
  for word in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do
    case "$verb $word" in
$VERBS$      verb="$verb $word" ;;
    esac
  done
  case "$verb:$previous" in
    " trace:-o"|" trace:--output") COMPREPLY=($(compgen -f -- "$current")); return ;;
    *:-o|*:--output) COMPREPLY=($(compgen -W 'table wide json yaml' -- "$current")); return ;;
    *:--endpoint) COMPREPLY=($(compgen -W 'unix: grpc:' -- "$current")); return ;;
    *:--job) job=1 ;;
  esac
  case "$verb" in
$CASES$  esac
  # Readline parts words at ':' and '='.
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case ${COMP_WORDS[i]} in
      --endpoint=*) endpoint=${COMP_WORDS[i]#*=} ;;
      --endpoint)
        [[ ${COMP_WORDS[i+1]} == = ]] && ((++i))
        endpoint=${COMP_WORDS[++i]} ;;
      *) continue ;;
    esac
    while [[ ${COMP_WORDS[i+1]} == : ]]; do
      endpoint+=:${COMP_WORDS[i+2]}
      ((i += 2))
    done
  done
  if [[ -n $job && $current != -* ]]; then
    words="$words $(optctl ${endpoint:+--endpoint "$endpoint"} get jobs 2>/dev/null | awk 'NR > 1 { print $1 }')"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -F _optctl optctl
)bash";

// zsh runs bash's completion through its own emulation. The first line has zsh
// find the script as the file _optctl of $fpath. Such a file is the function
// that the first Tab calls, so the last line completes.
constexpr char kZshBegin[] =
    "#compdef optctl\n"
    "autoload -U +X bashcompinit && bashcompinit\n";
constexpr char kZshEnd[] =
    "if [[ ${funcstack[1]} == _optctl ]]; then _bash_complete -F _optctl; fi\n";

std::string Replace(std::string text, const std::string& what,
                    const std::string& with) {
  const size_t at = text.find(what);
  return text.replace(at, what.size(), with);
}

std::string BashScript(const std::vector<Node>& nodes) {
  std::string verbs, cases;
  for (const Node& node : nodes) {
    if (!node.path.empty()) {
      absl::StrAppend(&verbs, verbs.empty() ? "" : "|", "\" ", node.path, "\"");
    }
    absl::StrAppend(&cases, "    \"", node.path.empty() ? "" : " ", node.path,
                    "\") words=\"", absl::StrJoin(node.words, " "), "\"",
                    node.takes_job ? "; job=1" : "", " ;;\n");
  }
  return Replace(
      Replace(kBash, "$VERBS$", absl::StrCat("      ", verbs, ")\n  ")),
      "$CASES$", cases);
}

std::string FishScript(const std::vector<Node>& nodes) {
  std::string script =
      "# fish completion of optctl: optctl completion fish | source\n"
      "complete -c optctl -f\n";
  for (const Node& node : nodes) {
    for (const std::string& word : node.words) {
      const std::string condition =
          node.path.empty()
              ? "__fish_use_subcommand"
              : absl::StrCat("string match -q -- '*", node.path,
                             "*' (string join ' ' (commandline -opc))");
      const bool flag = word.rfind("--", 0) == 0;
      absl::StrAppend(&script, "complete -c optctl -n \"", condition, "\" ",
                      flag ? "-l " : "-a ", flag ? word.substr(2) : word, "\n");
    }
  }
  return script;
}

absl::Status Run(const CLI::App& app, const std::string& shell) {
  std::vector<Node> nodes;
  Collect(app, "", nodes);
  if (shell == "fish") return Write(FishScript(nodes));
  if (shell == "bash") return Write(BashScript(nodes));
  return Write(absl::StrCat(kZshBegin, BashScript(nodes), kZshEnd));
}

}  // namespace

void AddCompletionCommand(CLI::App& app, Context& context) {
  CLI::App* command =
      app.add_subcommand("completion",
                         "Prints the completion script of a shell; "
                         "bash: source <(optctl completion bash)");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember(
          std::vector<std::string>(kShells.begin(), kShells.end())));
  command->callback([&app, &context, shell] {
    context.run = [&app, shell] { return Run(app, *shell); };
  });
}

}  // namespace optstate::ctl
