// What the XLA FFI targets of all transports have in common: their signature, and what they refuse.

#pragma once

#include <utility>

#include "calls.h"
#include "xla/ffi/api/ffi.h"

namespace sparkjax {

// An array, the world, the kind of call and its root; an array comes back. `binding` is what a
// platform asks for in front of them.
template <typename Binding>
auto call_binding(Binding binding) {
  return std::move(binding)
      .template Arg<xla::ffi::AnyBuffer>()
      .template Ret<xla::ffi::AnyBuffer>()
      .template Attr<int64_t>("world")
      .template Attr<int64_t>("kind")
      .template Attr<int64_t>("root");
}

inline bool is_half(const xla::ffi::AnyBuffer& x) {
  return x.element_type() == xla::ffi::DataType::BF16;
}

// Success where a call can be made of a world that is there, or is not.
inline xla::ffi::Error accepted(const std::string& transport, bool there, int64_t kind,
                                const xla::ffi::AnyBuffer& x) {
  using xla::ffi::Error, xla::ffi::ErrorCode;
  if (!there) return Error(ErrorCode::kFailedPrecondition, transport + ": no such world");
  if (kind == kAllReduce && !is_half(x) && x.element_type() != xla::ffi::DataType::F32)
    return Error(ErrorCode::kInvalidArgument, transport + ": all_reduce takes float32 or bfloat16");
  return Error::Success();
}

}  // namespace sparkjax
