// The XLA FFI targets. Shapes are checked here; the work is in the headers.

#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "xla/ffi/api/ffi.h"

namespace sparkjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "sparkjax native: " + what);
}

int64_t clamp(int64_t a, int64_t low, int64_t high) { return a < low ? low : a > high ? high : a; }

// x f32 [rows, K]; layer, live int32 []; weights [L, N, bytes of a row] or [L, N, K] -> f32
// [rows, N] each.
ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> layer,
                  ffi::Buffer<ffi::S32> live, ffi::RemainingArgs weights, ffi::RemainingRets results,
                  ffi::Span<const int64_t> kinds) {
  if (x.dimensions().size() != 2) return invalid("x is not a matrix");
  if (weights.size() != results.size() || weights.size() != kinds.size())
    return invalid("as many weights, results and kinds");
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  std::vector<Weight> list;
  for (size_t i = 0; i < weights.size(); ++i) {
    auto w = weights.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!w || !y) return invalid("an operand is no buffer");
    const auto shape = w->dimensions();
    const int64_t kind = kinds[i];
    if (shape.size() != 3 || kind < 0 || kind >= kKinds) return invalid("unknown weight");
    const int64_t stored = shape[2] * static_cast<int64_t>(ffi::ByteWidth(w->element_type()));
    if (stored != row_bytes(kind, k) || (kind >= kQ4_0 && k % kBlock))
      return invalid("the weight's rows do not have x's width");
    if ((*y)->dimensions().size() != 2 || (*y)->dimensions()[0] != rows ||
        (*y)->dimensions()[1] != shape[1])
      return invalid("a result of another shape");
    const int64_t at = clamp(*layer.typed_data(), 0, shape[0] - 1);
    list.push_back({kind, static_cast<const uint8_t*>(w->untyped_data()) + at * shape[1] * stored,
                    shape[1], (*y)->typed_data()});
  }
  linear_group(pool, pool.num_threads(), x.typed_data(), rows, clamp(*live.typed_data(), 0, rows),
               k, list.data(), static_cast<int64_t>(list.size()));
  return ffi::Error::Success();
}

// ids int32 [T]; table [N, bytes of a row] or [N, K] -> f32 [T, K].
ffi::Error embed_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> ids, ffi::AnyBuffer table,
                      ffi::ResultBuffer<ffi::F32> out, int64_t kind) {
  const auto shape = table.dimensions();
  if (shape.size() != 2 || out->dimensions().size() != 2 || kind < 0 || kind >= kKinds)
    return invalid("unknown table");
  const int64_t k = out->dimensions()[1];
  if (shape[1] * static_cast<int64_t>(ffi::ByteWidth(table.element_type())) != row_bytes(kind, k) ||
      (kind >= kQ4_0 && k % kBlock) ||
      out->dimensions()[0] != static_cast<int64_t>(ids.element_count()))
    return invalid("a result of another shape");
  if (shape[0] == 0) return invalid("an empty table");
  embed(pool, pool.num_threads(), kind, static_cast<const uint8_t*>(table.untyped_data()), shape[0],
        k, ids.typed_data(), out->dimensions()[0], out->typed_data());
  return ffi::Error::Success();
}

// q f32 [B, Q, Hq, D]; k, v f32 [L, P, S, Hk, D or Dv]; layer int32 []; page_table int32 [B, T];
// start, lengths int32 [B]; sinks f32 [Hq] or [0] -> f32 [B, Q, Hq, Dv].
ffi::Error paged_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                           ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::S32> layer,
                           ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> start,
                           ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::F32> sinks,
                           ffi::ResultBuffer<ffi::F32> out, float scale, float softcap,
                           int64_t window) {
  const auto qs = q.dimensions(), ks = k.dimensions(), vs = v.dimensions(),
             ts = page_table.dimensions();
  if (qs.size() != 4 || ks.size() != 5 || vs.size() != 5 || ts.size() != 2)
    return invalid("attention: wrong ranks");
  for (int i = 0; i < 4; ++i)
    if (ks[i] != vs[i] || ks[i] == 0) return invalid("attention: k and v planes differ");
  if (qs[3] != ks[4] || qs[2] % ks[3] || ts[0] != qs[0] || ts[1] == 0 ||
      static_cast<int64_t>(start.element_count()) != qs[0] ||
      static_cast<int64_t>(lengths.element_count()) != qs[0] ||
      (sinks.element_count() && static_cast<int64_t>(sinks.element_count()) != qs[2]) ||
      static_cast<int64_t>(out->element_count()) != qs[0] * qs[1] * qs[2] * vs[4])
    return invalid("attention: shapes do not fit");
  const int64_t at = clamp(*layer.typed_data(), 0, ks[0] - 1), places = ks[1] * ks[2] * ks[3];
  Attention a;
  a.q = q.typed_data();
  a.k = k.typed_data() + at * places * ks[4];
  a.v = v.typed_data() + at * places * vs[4];
  a.out = out->typed_data();
  a.batch = qs[0];
  a.queries = qs[1];
  a.heads = qs[2];
  a.kv_heads = ks[3];
  a.dim = qs[3];
  a.value_dim = vs[4];
  a.pages = ks[1];
  a.page = ks[2];
  a.table = ts[1];
  a.page_table = page_table.typed_data();
  a.start = start.typed_data();
  a.lengths = lengths.typed_data();
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.scale = scale;
  a.softcap = softcap;
  a.window = window;
  if (a.queries > 0) attention(pool, pool.num_threads(), a);
  return ffi::Error::Success();
}

// plane [L, P, S, ...] in place; rows [B, Q, ...].
ffi::Error paged_write_rows(ffi::AnyBuffer plane, ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> layer,
                            ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> start,
                            ffi::Buffer<ffi::S32> lengths, ffi::Result<ffi::AnyBuffer> out) {
  const auto ps = plane.dimensions(), rs = rows.dimensions(), ts = page_table.dimensions();
  if (ps.size() < 3 || rs.size() != ps.size() - 1 || ts.size() != 2 || ts[0] != rs[0] ||
      plane.element_type() != rows.element_type() || plane.size_bytes() != out->size_bytes() ||
      static_cast<int64_t>(start.element_count()) != rs[0] ||
      static_cast<int64_t>(lengths.element_count()) != rs[0])
    return invalid("paged_write: shapes do not fit");
  int64_t bytes = static_cast<int64_t>(ffi::ByteWidth(plane.element_type()));
  for (size_t i = 3; i < ps.size(); ++i) {
    if (ps[i] != rs[i - 1]) return invalid("paged_write: shapes do not fit");
    bytes *= ps[i];
  }
  if (plane.size_bytes() == 0) return ffi::Error::Success();
  // XLA gives both the same memory; it copies beforehand where the operand must live on.
  if (out->untyped_data() != plane.untyped_data())
    std::memcpy(out->untyped_data(), plane.untyped_data(), plane.size_bytes());
  const int64_t at = clamp(*layer.typed_data(), 0, ps[0] - 1);
  paged_write(static_cast<uint8_t*>(out->untyped_data()) + at * ps[1] * ps[2] * bytes,
              static_cast<const uint8_t*>(rows.untyped_data()), rs[0], rs[1], bytes, ps[1], ps[2],
              ts[1], page_table.typed_data(), start.typed_data(), lengths.typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sparkjax

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_linear, sparkjax::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("kinds"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_embed, sparkjax::embed_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("kind"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_paged_attention, sparkjax::paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_paged_write, sparkjax::paged_write_rows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
