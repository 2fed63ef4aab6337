// Collectives over a network, as XLA FFI calls on a CPU: the calling thread does all the work.

#include "../handler.h"
#include "world.h"

namespace sparkjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error collective(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, int64_t id, int64_t kind,
                      int64_t root) {
  World* w = world_of(id);
  if (ffi::Error error = accepted("fabric", w && w->network, kind, x); error.failure())
    return error;
  const std::string error =
      on_host(*w, kind, static_cast<const char*>(x.untyped_data()),
              static_cast<char*>(y->untyped_data()), static_cast<int64_t>(x.size_bytes()),
              static_cast<int>(root), is_half(x));
  if (error.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, "fabric: " + error);
}

}  // namespace

std::string attach(World&, int) { return ""; }
void detach(World&) {}

}  // namespace sparkjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_fabric, sparkjax::collective,
                              sparkjax::call_binding(xla::ffi::Ffi::Bind()));
