"""system_library: an external repository with cc_library targets for libraries that Debian installed.

Headers come from /usr/include, so a target mostly carries link flags, asked from pkg-config. It links
shared objects, or archives when --config=release sets link=static. Where Debian ships no archive,
`run_time` makes a release artefact load the shared object when it starts.
"""

# The libraries of glibc 2.36 itself; release artefacts link these, and nothing else, dynamically.
_GLIBC = ["c", "dl", "m", "pthread", "rt"]

_TARGET = """
cc_library(
    name = "{name}",
    srcs = select({{
        "@optstate//deploy/bazel:link_static": {run_time_srcs},
        "//conditions:default": [],
    }}),
    # The linker sees our objects before the archives of `linkopts` that call them.
    alwayslink = {alwayslink},
    copts = ["-w"],
    defines = {defines},
    linkopts = select({{
        "@optstate//deploy/bazel:link_static": {static},
        "//conditions:default": {shared},
    }}),
    visibility = ["//visibility:public"],
)
"""

def _fail_missing(ctx, what):
    fail("{} was not found: install it with `apt-get install {}` or run deploy/setup".format(
        what,
        ctx.attr.apt,
    ))

def _pkg_config(ctx, args):
    tool = ctx.which("pkg-config")
    if not tool:
        fail("pkg-config was not found: install it with `apt-get install pkg-config` or run deploy/setup")
    result = ctx.execute([tool] + args)
    if result.return_code != 0:
        _fail_missing(ctx, " ".join(args))
    return [flag for flag in result.stdout.replace("\n", " ").split(" ") if flag]

def _unique(items):
    return {item: None for item in items}.keys()

def _library_dirs(ctx):
    machine = ctx.execute(["uname", "-m"]).stdout.strip()
    gcc = ctx.execute(["g++", "-print-file-name=libatomic.a"]).stdout.strip()
    return ["/usr/lib/{}-linux-gnu".format(machine), "/usr/lib", gcc.rpartition("/")[0]]

def _expand(ctx, modules):
    """Replaces "absl_*" by all installed modules of that name, as Abseil has more than a hundred."""
    expanded = []
    for module in modules:
        if not module.endswith("*"):
            expanded.append(module)
            continue
        installed = [m for m in _pkg_config(ctx, ["--list-package-names"]) if m.startswith(module[:-1])]
        if not installed:
            _fail_missing(ctx, module)
        expanded += installed
    return expanded

def _link_flags(ctx, modules, dirs, static):
    names = [m for m in modules if not m.startswith("-l")]
    flags = [m for m in modules if m.startswith("-l")]
    if names:
        flags += _pkg_config(ctx, (["--static"] if static else []) + ["--libs"] + _expand(ctx, names))

    libraries = []
    for flag in _unique([f for f in flags if f.startswith("-l")]):
        name = flag[2:]
        has = {
            suffix: [d for d in dirs if ctx.path("{}/lib{}.{}".format(d, name, suffix)).exists]
            for suffix in ["a", "so"]
        }
        if name in _GLIBC:
            libraries.append(flag)
        elif static and has["a"]:
            libraries.append("-l:lib{}.a".format(name))
        elif static and ctx.attr.run_time:
            continue
        elif has["a"] or has["so"]:
            libraries.append(flag)
        elif not static:
            # --static also names libraries that a module needs only on other systems.
            _fail_missing(ctx, "lib" + name)

    # Flags are deduplicated, which makes their order meaningless: hence a group, or only what is needed.
    if static:
        return ["-pthread", "-Wl,--start-group"] + libraries + ["-l:libstdc++.a", "-Wl,--end-group"]
    return ["-pthread", "-Wl,--push-state,--as-needed"] + libraries + ["-Wl,--pop-state"]

def _run_time_source(ctx, soname, prefixes, dirs):
    """Writes the C file that forwards to functions of a shared object which is opened at run time."""
    found = [d for d in dirs if ctx.path("{}/{}".format(d, soname)).exists]
    if not found:
        _fail_missing(ctx, soname)
    symbols = ctx.execute(["nm", "-D", "--defined-only", "{}/{}".format(found[0], soname)]).stdout
    functions = []
    for line in symbols.splitlines():
        fields = line.split(" ")
        name = fields[-1].partition("@")[0]
        if fields[-2] in ["T", "i"] and [p for p in prefixes if name.startswith(p)]:
            functions.append(name)
    functions = _unique(functions)
    if not functions:
        fail("{} has no function {}*".format(soname, prefixes))
    source = soname.partition(".")[0] + "_run_time.c"
    ctx.template(source, ctx.attr._run_time_template, substitutions = {
        "{count}": str(len(functions)),
        "{functions}": "\n".join(["FUNCTION({}, {})".format(i, f) for i, f in enumerate(functions)]),
        "{id}": soname.partition(".")[0],
        "{missing}": str(ctx.attr.missing),
        "{soname}": soname,
    })
    return source

def _version_define(ctx):
    """A define that changes with the package.

    Bazel does not look at headers under /usr/include; this makes it compile again when they change.
    """
    packages = ctx.attr.apt.split(" ")
    result = ctx.execute(["dpkg-query", "--show", "--showformat=${Version} "] + packages)
    version = "".join([c if c.isalnum() else "_" for c in result.stdout.strip().elems()])
    return "OPTSTATE_{}_PACKAGE=_{}".format(ctx.name.upper(), version)

def _system_library_impl(ctx):
    for header in ctx.attr.headers:
        if not ctx.path("/usr/include/" + header).exists:
            _fail_missing(ctx, header)
    dirs = _library_dirs(ctx)
    for src in ctx.attr.run_time_srcs:
        ctx.symlink(src, src.name)
    run_time_srcs = [src.name for src in ctx.attr.run_time_srcs]
    for soname, prefixes in ctx.attr.run_time.items():
        run_time_srcs.append(_run_time_source(ctx, soname, prefixes, dirs))

    build = ""
    for name, modules in ctx.attr.targets.items():
        build += _TARGET.format(
            name = name,
            alwayslink = bool(run_time_srcs),
            run_time_srcs = repr(run_time_srcs),
            defines = repr(ctx.attr.defines + [_version_define(ctx)]),
            static = repr(_link_flags(ctx, modules, dirs, True) if modules else []),
            shared = repr(_link_flags(ctx, modules, dirs, False) if modules else []),
        )
    ctx.file("BUILD.bazel", build)

system_library = repository_rule(
    implementation = _system_library_impl,
    attrs = {
        "apt": attr.string(mandatory = True, doc = "Debian packages, separated by spaces"),
        "defines": attr.string_list(),
        "headers": attr.string_list(doc = "files under /usr/include that must exist"),
        "missing": attr.int(doc = "what a function returns when its run_time library is missing"),
        "run_time": attr.string_list_dict(
            doc = "release only: soname to prefixes of the functions that are looked up at start-up",
        ),
        "run_time_srcs": attr.label_list(
            allow_files = True,
            doc = "release only: optstate_fallback_foo stands in where run_time has no foo",
        ),
        "targets": attr.string_list_dict(
            mandatory = True,
            doc = "target name to pkg-config modules; -lfoo names a library that has no module",
        ),
        "_run_time_template": attr.label(default = "@optstate//deploy/bazel:run_time_library.c.tpl"),
    },
    local = True,
)
