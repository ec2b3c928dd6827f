"""optstate_proto_library: .proto files to a cc_library, with the protoc and gRPC plugin that Debian installed.

proto/ is the import root: proto/optstate/v1/types.proto is imported as "optstate/v1/types.proto"
and included as "optstate/v1/types.pb.h".
"""

_ROOT = "proto"

_ProtoSources = provider(fields = ["files"])

def _generate_impl(ctx):
    transitive = depset(ctx.files.srcs, transitive = [dep[_ProtoSources].files for dep in ctx.attr.deps])
    out = "{}/{}".format(ctx.bin_dir.path, _ROOT)
    args = ctx.actions.args()
    args.add("--proto_path=" + _ROOT)
    args.add("--cpp_out=" + out)
    if ctx.attr.grpc:
        args.add("--plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin")
        args.add("--grpc_out=" + ("generate_mock_code=true:" if ctx.attr.mock else "") + out)
    args.add_all(ctx.files.srcs)
    ctx.actions.run(
        executable = "/usr/bin/protoc",
        arguments = [args],
        inputs = transitive,
        outputs = ctx.outputs.outs,
        mnemonic = "ProtocCpp",
        progress_message = "Generating C++ for %s" % ctx.label,
    )
    return [_ProtoSources(files = transitive), DefaultInfo(files = depset(ctx.outputs.outs))]

_generate = rule(
    implementation = _generate_impl,
    attrs = {
        "deps": attr.label_list(providers = [_ProtoSources]),
        "grpc": attr.bool(),
        "mock": attr.bool(),
        "outs": attr.output_list(),
        "srcs": attr.label_list(allow_files = [".proto"]),
    },
    output_to_genfiles = False,
)

def _include_root_impl(ctx):
    context = cc_common.create_compilation_context(
        system_includes = depset(["{}/{}".format(ctx.bin_dir.path, _ROOT)]),
    )
    return [CcInfo(compilation_context = context)]

# Adds the generated proto/ to the include path as a system directory: warnings in generated code
# are not ours. (cc_library's own `includes` may not point above its package.)
proto_include_root = rule(implementation = _include_root_impl)

def _sources_label(dep):
    """The label of the generated sources that belong to an optstate_proto_library."""
    if dep.startswith("//") and ":" not in dep:
        dep += ":" + dep.rpartition("/")[2]
    return dep + "_sources"

def optstate_proto_library(name, srcs, deps = [], grpc = False, **kwargs):
    """Messages of `srcs` and, with grpc = True, the stubs (and mocks) of their services.

    Args:
      name: of the cc_library
      srcs: .proto files below proto/
      deps: optstate_proto_library targets whose files are imported
      grpc: whether to generate gRPC code too
      **kwargs: passed on to cc_library (visibility, testonly, ...)
    """
    package = native.package_name()
    if package != _ROOT and not package.startswith(_ROOT + "/"):
        fail("optstate_proto_library belongs below {}/, not in {}".format(_ROOT, package))
    stems = [src[:-len(".proto")].lstrip(":") for src in srcs]
    suffixes = [".pb"] + ([".grpc.pb"] if grpc else [])
    hdrs = [stem + suffix + ".h" for stem in stems for suffix in suffixes]
    if grpc:
        hdrs += [stem + "_mock.grpc.pb.h" for stem in stems]
    cc = [stem + suffix + ".cc" for stem in stems for suffix in suffixes]
    _generate(
        name = name + "_sources",
        srcs = srcs,
        outs = hdrs + cc,
        deps = [_sources_label(dep) for dep in deps],
        grpc = grpc,
        mock = grpc,
        visibility = kwargs.get("visibility"),
    )

    native.cc_library(
        name = name,
        srcs = cc,
        hdrs = hdrs,
        copts = ["-w", "-fvisibility=hidden"],
        deps = deps + ["//deploy/bazel:proto_include_root", "@protobuf//:protobuf"] + (["@grpc//:grpc++"] if grpc else []),
        **kwargs
    )
