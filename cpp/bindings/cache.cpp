// caudex._core.PrefixCache and what it hands out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "cache/prefix_cache.hpp"
#include "cache_options.hpp"
#include "python_policy.hpp"
#include "tokens.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

using BlockArray = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

// Calls on more tokens than this let other Python threads run meanwhile.
constexpr std::size_t kLongCall = 4096;

double wall_time() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One cache, its lock, and what makes both safe under Python.
//
// A thread that has to wait for the lock gives up the GIL first, so the holder may take the GIL (to return, or to run
// a policy written in Python) without a deadlock.
class SharedCache {
 public:
  SharedCache(const CacheOptions& options, bool manual_clock) : manual_clock_(manual_clock), cache_(options) {}
  ~SharedCache() { release_orphans(); }

  template <typename Call>
  auto locked(Call call) {
    if (owner_.load() == std::this_thread::get_id()) {
      throw std::runtime_error("an eviction policy must not call the cache that is asking it");
    }
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      nb::gil_scoped_release release;
      lock.lock();
    }
    Owner owner(owner_);
    if (!manual_clock_) cache_.set_time(wall_time());
    release_orphans();
    return call(cache_);
  }

  // The same without the GIL.
  template <typename Call>
  auto locked_without_gil(Call call) {
    return locked([&](PrefixCache& cache) {
      nb::gil_scoped_release release;
      return call(cache);
    });
  }

  // A Python object was dropped without release(). Never waits: it may be the garbage collector that calls.
  void abandon(std::unique_ptr<Sequence> sequence) {
    std::lock_guard<std::mutex> lock(orphans_mutex_);
    orphans_.push_back(std::move(sequence));
    has_orphans_ = true;
  }

 private:
  struct Owner {
    explicit Owner(std::atomic<std::thread::id>& owner) : owner(owner) { owner = std::this_thread::get_id(); }
    ~Owner() { owner = std::thread::id(); }
    std::atomic<std::thread::id>& owner;
  };

  void release_orphans() {
    if (!has_orphans_) return;
    std::vector<std::unique_ptr<Sequence>> orphans;
    {
      std::lock_guard<std::mutex> lock(orphans_mutex_);
      orphans.swap(orphans_);
      has_orphans_ = false;
    }
    for (auto& sequence : orphans) {
      if (sequence->running) cache_.release(*sequence);
    }
  }

  bool manual_clock_;
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
  std::mutex orphans_mutex_;
  std::vector<std::unique_ptr<Sequence>> orphans_;  // before the cache, which still knows them when it goes
  PrefixCache cache_;
  std::atomic<bool> has_orphans_{false};
};

struct PySequence {
  std::shared_ptr<SharedCache> cache;
  std::unique_ptr<Sequence> state = std::make_unique<Sequence>();

  explicit PySequence(std::shared_ptr<SharedCache> cache) : cache(std::move(cache)) {}
  PySequence(PySequence&&) = default;
  ~PySequence() {
    if (state != nullptr && state->running) cache->abandon(std::move(state));
  }

  const Sequence& running() const {
    if (!state->running) throw std::invalid_argument("this sequence has been released: begin() a new one");
    return *state;
  }
};

// What PrefixCache.pin() hands out.
struct PyPin {
  PySequence held;
};

struct PyCache {
  std::shared_ptr<SharedCache> shared;
  std::shared_ptr<nb::object> policy;  // written in Python, or null
};

// A policy may refer to its own cache: the garbage collector has to see that.
int traverse_cache(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const PyCache* cache = nb::inst_ptr<PyCache>(self);
  if (cache->policy != nullptr) Py_VISIT(cache->policy->ptr());
  return 0;
}

int clear_cache(PyObject* self) {
  PyCache* cache = nb::inst_ptr<PyCache>(self);
  if (cache->policy != nullptr) *cache->policy = nb::none();
  return 0;
}

PyType_Slot cache_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_cache)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear_cache)},
                             {0, nullptr}};

BlockArray to_numpy(std::vector<BlockId> blocks) {
  auto* owned = new std::vector<BlockId>(std::move(blocks));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<BlockId>*>(p); });
  return BlockArray(owned->data(), {owned->size()}, owner);
}

std::size_t to_count(std::int64_t value, const char* what) {
  if (value < 0) throw std::invalid_argument(std::string(what) + " cannot be negative, got " + std::to_string(value));
  return static_cast<std::size_t>(value);
}

Grain to_grain(const std::string& index) {
  if (index == "radix") return Grain::kToken;
  if (index == "hash") return Grain::kBlock;
  throw std::invalid_argument("unknown index '" + index + "': choose 'radix' or 'hash'");
}

Sharing to_sharing(const std::string& name) {
  if (name == "isolated") return Sharing::kIsolated;
  if (name == "shared") return Sharing::kShared;
  if (name == "public") return Sharing::kPublic;
  if (name == "k_anonymous") return Sharing::kAnonymous;
  throw std::invalid_argument("unknown sharing '" + name +
                              "': choose 'isolated', 'shared', 'public' or 'k_anonymous'");
}

constexpr std::int64_t kMaxBlocks = 1 << 30;

std::uint32_t to_option(std::int64_t value, const char* what, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return static_cast<std::uint32_t>(value);
  throw std::invalid_argument(std::string(what) + " must be from " + std::to_string(least) + " to " +
                              std::to_string(most) + ", got " + std::to_string(value));
}

}  // namespace

CacheOptions make_options(std::int64_t num_blocks, std::int64_t block_size, const std::string& index,
                          nb::handle policy, const std::string& hash, std::optional<std::uint64_t> secret, std::optional<std::int64_t> window,
                          const std::string& sharing, std::int64_t k, std::optional<std::int64_t> pin_budget,
                          std::shared_ptr<nb::object>* python_policy) {
  CacheOptions options;
  options.num_blocks = to_option(num_blocks, "num_blocks", 1, kMaxBlocks);
  options.block_size = to_option(block_size, "block_size", 1, 1 << 16);
  options.grain = to_grain(index);
  std::shared_ptr<nb::object> held = set_policy(options, policy);
  if (python_policy != nullptr) *python_policy = std::move(held);
  options.hash = hash;
  options.secret = secret ? *secret : random_secret();
  options.thrash_window = to_option(window.value_or(num_blocks / 2), "thrash_window", 0, kMaxBlocks);
  options.sharing = to_sharing(sharing);
  options.k = to_option(k, "k", 2, 1 << 16);
  options.pin_budget = to_option(pin_budget.value_or(num_blocks / 2), "pin_budget", 0, num_blocks);
  return options;
}

namespace {

// A prompt as Python gives it: tokens, and [(start, end, key), ...] for content that is not text.
class PromptArgument {
 public:
  PromptArgument(nb::handle tokens, const std::string& space, const std::string& tenant, nb::handle content)
      : ids_(tokens) {
    prompt_.tokens = ids_.data();
    prompt_.count = ids_.size();
    prompt_.space = space;
    prompt_.tenant = tenant;
    if (content.is_none()) return;
    for (nb::handle item : content) {
      auto [start, end, key] = nb::cast<std::tuple<std::int64_t, std::int64_t, nb::bytes>>(item);
      const auto limit = static_cast<std::int64_t>(prompt_.count);
      prompt_.content.push_back({to_option(start, "the start of content", 0, limit),
                                 to_option(end, "the end of content", 0, limit),
                                 std::string(key.c_str(), key.size())});
    }
  }
  const Prompt& operator*() const { return prompt_; }
  bool is_long() const { return prompt_.count > kLongCall; }

 private:
  TokenArgument ids_;
  Prompt prompt_;
};

template <typename Call>
auto call(PyCache& self, const PromptArgument& prompt, Call run) {
  return prompt.is_long() ? self.shared->locked_without_gil(run) : self.shared->locked(run);
}

using Start = void (PrefixCache::*)(Sequence&, const Prompt&);

template <Start start>
PySequence begin(PyCache& self, nb::handle tokens, const std::string& space, const std::string& tenant,
                 nb::handle content, std::optional<SessionHints> hints) {
  PromptArgument prompt(tokens, space, tenant, content);
  PySequence sequence(self.shared);
  if (hints) sequence.state->hints = *hints;
  call(self, prompt, [&](PrefixCache& cache) { (cache.*start)(*sequence.state, *prompt); });
  return sequence;
}

std::vector<Sequence*> states_of(PyCache& self, nb::list sequences) {
  std::vector<Sequence*> states;
  states.reserve(sequences.size());
  for (nb::handle item : sequences) {
    auto& sequence = nb::cast<PySequence&>(item);
    if (sequence.cache != self.shared) throw std::invalid_argument("a sequence belongs to another cache");
    states.push_back(sequence.state.get());
  }
  return states;
}

template <typename Get>
auto counter(Get get) {
  return [get](PyCache& self) { return self.shared->locked([&](PrefixCache& cache) { return (cache.*get)(); }); };
}

nb::list take_events(PyCache& self) {
  std::vector<CacheEvent> events;
  std::vector<std::string> spaces;
  self.shared->locked([&](PrefixCache& cache) {
    events = cache.take_events();
    for (const CacheEvent& event : events) spaces.push_back(cache.space_name(event.space));
  });
  nb::list out;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const CacheEvent& event = events[i];
    if (event.kind == CacheEvent::Kind::kCleared) {
      out.append(nb::make_tuple("cleared"));
    } else if (event.kind == CacheEvent::Kind::kRemoved) {
      out.append(nb::make_tuple("removed", event.blocks));
    } else {
      nb::object parent = event.has_parent ? nb::cast(event.parent) : nb::none();
      out.append(nb::make_tuple("stored", event.blocks, parent, event.tokens, spaces[i]));
    }
  }
  return out;
}

BlockArray count_cached(PyCache& self, nb::list prompts, const std::string& space, const std::string& tenant) {
  std::vector<PromptArgument> arguments;
  arguments.reserve(prompts.size());
  for (nb::handle prompt : prompts) arguments.emplace_back(prompt, space, tenant, nb::none());
  std::vector<std::int32_t> counts(arguments.size());
  self.shared->locked_without_gil([&](PrefixCache& cache) {
    for (std::size_t i = 0; i < counts.size(); ++i) {
      counts[i] = static_cast<std::int32_t>(cache.count_cached(*arguments[i]));
    }
  });
  return to_numpy(std::move(counts));
}

// The keys of a prompt's whole blocks.
nb::list block_keys(nb::handle tokens, std::int64_t block_size, const std::string& hash, const std::string& space,
                    std::uint64_t secret) {
  TokenArgument ids(tokens);
  const std::uint32_t size = to_option(block_size, "block_size", 1, 1 << 16);
  const std::unique_ptr<BlockHasher> hasher = make_hasher(hash, secret);
  std::uint8_t key[kMaxKeyBytes];
  hasher->root(space, key);
  nb::list keys;
  for (std::size_t end = size; end <= ids.size(); end += size) {
    hasher->chain(key, ids.data() + end - size, size, key);
    keys.append(nb::bytes(reinterpret_cast<const char*>(key), hasher->key_bytes()));
  }
  return keys;
}

const char* reason_name(MissReason reason) {
  switch (reason) {
    case MissReason::kComplete: return "complete";
    case MissReason::kEvicted: return "evicted";
    case MissReason::kOtherNamespace: return "other_namespace";
    case MissReason::kDiverged: return "diverged";
    case MissReason::kBelowBlock: return "below_block";
    case MissReason::kNeverSeen: break;
  }
  return "never_seen";
}

void bind_explanation(nb::module_& m) {
  nb::class_<Explanation>(m, "Explanation", "Why a prompt did not hit further.")
      .def_prop_ro("reason", [](const Explanation& self) { return reason_name(self.reason); },
                   "The most telling of 'complete', 'evicted', 'other_namespace', 'diverged', 'below_block', "
                   "'never_seen'.")
      .def_ro("num_tokens", &Explanation::num_tokens)
      .def_ro("num_cached", &Explanation::num_cached)
      .def_ro("evicted_seconds_ago", &Explanation::evicted_seconds_ago, "When the next block went.")
      .def_ro("policy", &Explanation::policy, "The policy that chose it.")
      .def_ro("num_evicted", &Explanation::num_evicted, "Tokens that would have followed, as far as remembered.")
      .def_ro("other_namespace", &Explanation::other_space, "Where more of the prompt is cached.")
      .def_ro("num_cached_there", &Explanation::num_cached_there)
      .def_ro("diverged_at", &Explanation::diverged_at, "The first token that differs from the closest cached prompt.")
      .def_prop_ro("expected_tokens", [](const Explanation& self) { return to_numpy(self.expected); },
                   nb::rv_policy::move, "How that one goes on there, a few tokens.");
  nb::class_<SessionHints>(m, "SessionHints",
                           "What a caller knows of the conversation a request belongs to; policies may use it.")
      .def(nb::init<std::uint64_t, double, bool, double>(), nb::kw_only(), nb::arg("session") = 0,
           nb::arg("expected_return") = -1.0, nb::arg("ends") = false, nb::arg("priority") = 0.0)
      .def_ro("session", &SessionHints::session, "Equal for the requests of one conversation; 0 when unknown.")
      .def_ro("expected_return", &SessionHints::expected_return,
              "Seconds until the next request of the session; negative when unknown.")
      .def_ro("ends", &SessionHints::ends, "No request of this session will follow.")
      .def_ro("priority", &SessionHints::priority, "Higher is kept longer, by policies that look at it.");
  nb::class_<Occupancy>(m, "Occupancy", "What lies in the pool right now.")
      .def_ro("pinned_blocks", &Occupancy::pinned_blocks)
      .def_ro("cached_blocks", &Occupancy::cached_blocks)
      .def_ro("unused_slots", &Occupancy::unused_slots, "Allocated and not filled: internal fragmentation.")
      .def_ro("repeated_slots", &Occupancy::repeated_slots,
              "Copies of slots that another block holds too, where prompts part inside a block.");
}

void bind_results(nb::module_& m) {
  nb::class_<BlockCopy>(m, "BlockCopy",
                        "Copy the KV of the first `num_slots` slots of block `src` to block `dst`.")
      .def_ro("src", &BlockCopy::source)
      .def_ro("dst", &BlockCopy::destination)
      .def_ro("num_slots", &BlockCopy::num_slots)
      .def("__repr__", [](const BlockCopy& c) {
        return "BlockCopy(src=" + std::to_string(c.source) + ", dst=" + std::to_string(c.destination) +
               ", num_slots=" + std::to_string(c.num_slots) + ")";
      });
  nb::class_<Match>(m, "Match", "The longest cached prefix of a prompt, as a look-up found it. Nothing is pinned by it.")
      .def_ro("num_tokens", &Match::num_tokens, "Cached tokens, at most one less than were asked for.")
      .def_ro("num_whole", &Match::num_whole, "Those of them that lie in whole blocks.")
      .def_prop_ro("blocks", [](const Match& self) { return to_numpy(self.blocks); }, nb::rv_policy::move,
                   "The whole blocks, in order.")
      .def_prop_ro(
          "partial",
          [](const Match& self) -> std::optional<std::pair<BlockId, Position>> {
            if (self.partial_block == kNoBlock) return std::nullopt;
            return std::pair(self.partial_block, self.num_tokens - self.num_whole);
          },
          "(block, slots): the rest lies in the first slots of that block, to be copied; None if there is no rest.");
  nb::class_<Stats>(m, "CacheStats",
                    "Exact counters since the cache was made. lookup_tokens = hit_whole_tokens + hit_partial_tokens + "
                    "missed_tokens.")
      .def_ro("requests", &Stats::requests, "Requests begun; resumed ones are counted apart.")
      .def_ro("lookup_tokens", &Stats::lookup_tokens, "Tokens of their prompts.")
      .def_ro("hit_whole_tokens", &Stats::hit_whole_tokens, "Found in whole blocks, which are shared.")
      .def_ro("hit_partial_tokens", &Stats::hit_partial_tokens, "Found in the first slots of a block, which are copied.")
      .def_prop_ro("missed_tokens", &Stats::missed_tokens, "To be computed.")
      .def_ro("resumed_requests", &Stats::resumed_requests, "Requests begun again after a preemption.")
      .def_ro("resumed_tokens", &Stats::resumed_tokens)
      .def_ro("resumed_hit_tokens", &Stats::resumed_hit_tokens)
      .def_ro("committed_tokens", &Stats::committed_tokens, "Computed, of prompts and outputs: committed beyond the hit.")
      .def_ro("adopted_blocks", &Stats::adopted_blocks, "Given back at commit because an equal block was there.")
      .def_ro("evicted_blocks", &Stats::evicted_blocks)
      .def_ro("evicted_tokens", &Stats::evicted_tokens)
      .def_ro("thrashed_tokens", &Stats::thrashed_tokens, "Computed again within the window of their eviction.");
}

void bind_sequence(nb::module_& m) {
  nb::class_<PySequence>(m, "CacheSequence",
                         "A running request: its tokens, its block table, and its pin on the cache.\n\n"
                         "Made by PrefixCache.begin(), resume() and fork(). After release() every use raises ValueError. A "
                         "sequence that is dropped without release() is released at the cache's next call.")
      .def_prop_ro("num_tokens", [](PySequence& self) { return self.running().tokens.size(); })
      .def_prop_ro("num_cached_tokens", [](PySequence& self) { return self.running().num_cached; },
                   "Found in the cache at the start; computing begins here.")
      .def_prop_ro("num_committed_tokens", [](PySequence& self) { return self.running().num_committed; })
      .def_prop_ro("is_released", [](PySequence& self) { return !self.state->running; })
      .def_prop_ro("tokens", [](PySequence& self) { return to_numpy(self.running().tokens); },
                   nb::rv_policy::move, "A copy, int32.")
      .def_prop_ro("block_table", [](PySequence& self) {
                     return self.cache->locked([&](PrefixCache&) { return to_numpy(self.running().table); });
                   },
                   nb::rv_policy::move,
                   "A copy, int32: the block of every `block_size` allocated slots. commit() may replace entries.")
      .def("allocate",
           [](PySequence& self, std::int64_t num_tokens) {
             const std::size_t count = to_count(num_tokens, "num_tokens");
             return self.cache->locked([&](PrefixCache& cache) { return cache.allocate(*self.state, count); });
           },
           nb::arg("num_tokens"),
           "Ensures slots for the first `num_tokens` tokens, evicting as needed, or raises OutOfBlocks and changes "
           "nothing.\n\nReturns the block copies that must be executed, in order, before any later KV write.")
      .def("append",
           [](PySequence& self, nb::object tokens) {
             TokenArgument ids(tokens);
             self.cache->locked([&](PrefixCache& cache) { cache.append(*self.state, ids.data(), ids.size()); });
           },
           nb::arg("tokens"), "Adds generated tokens.")
      .def("commit",
           [](PySequence& self, std::int64_t num_tokens) {
             const std::size_t count = to_count(num_tokens, "num_tokens");
             self.cache->locked([&](PrefixCache& cache) { cache.commit(*self.state, count); });
           },
           nb::arg("num_tokens"),
           "Says that the KV of the first `num_tokens` tokens has been written, so that they can be matched.\n\n"
           "Blocks that another request committed first take the place of this one's: read block_table again.")
      .def("set_hints",
           [](PySequence& self, const SessionHints& hints) {
             self.running();
             self.cache->locked([&](PrefixCache&) { self.state->hints = hints; });
           },
           nb::arg("hints"), "Replaces what is known of the conversation, before release().")
      .def("fork",
           [](PySequence& self) {
             PySequence child(self.cache);
             self.cache->locked([&](PrefixCache& cache) { cache.fork(*self.state, *child.state); });
             return child;
           },
           "A second request that shares all that is committed here. Takes one block if that ends inside a block, and "
           "raises OutOfBlocks if there is none; the copy is among those the next allocation returns.")
      .def("release",
           [](PySequence& self) {
             self.cache->locked([&](PrefixCache& cache) { cache.release(*self.state); });
           },
           "Ends the request: unpins its blocks. What is committed stays cached.");
}

void bind_pin(nb::module_& m) {
  nb::class_<PyPin>(m, "Pin", "A prefix that is kept until release(), or until this object is dropped.")
      .def_prop_ro("num_tokens", [](PyPin& self) { return self.held.running().num_cached; }, "In whole blocks.")
      .def_prop_ro("blocks", [](PyPin& self) { return to_numpy(self.held.running().table); }, nb::rv_policy::move)
      .def("release", [](PyPin& self) {
        self.held.cache->locked([&](PrefixCache& cache) { cache.release(*self.held.state); });
      });
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::exception<OutOfBlocks>(m, "OutOfBlocks", PyExc_RuntimeError);
  bind_results(m);
  bind_sequence(m);
  bind_pin(m);
  bind_explanation(m);
  bind_policy(m);
  m.def("policy_names", &policy_names, "The eviction policies that can be chosen by name.");
  m.def("block_keys", &block_keys, nb::arg("tokens"), nb::arg("block_size") = 16, nb::kw_only(),
        nb::arg("hash") = "sha256", nb::arg("namespace") = "", nb::arg("secret") = 0,
        "The chained keys of a prompt's whole blocks, as a cache with this hash, namespace and secret has them.");
  m.def("hasher_names", &hasher_names, "The block hashes that can be chosen by name.");

  nb::class_<PyCache>(m, "PrefixCache", nb::type_slots(cache_slots),
                      "The compiled part of caudex.cache.PrefixCache, which documents it.")
      .def("__init__",
           [](PyCache* self, std::int64_t num_blocks, std::int64_t block_size, const std::string& index,
              nb::handle policy, const std::string& hash, std::optional<std::uint64_t> secret,
              std::optional<std::int64_t> thrash_window, const std::string& sharing, std::int64_t k,
              std::optional<std::int64_t> pin_budget, bool manual_clock) {
             std::shared_ptr<nb::object> held;
             const CacheOptions options = make_options(num_blocks, block_size, index, policy, hash, secret, thrash_window,
                                                       sharing, k, pin_budget, &held);
             new (self) PyCache{std::make_shared<SharedCache>(options, manual_clock), std::move(held)};
           },
           nb::arg("num_blocks"), nb::arg("block_size") = 16, nb::kw_only(), nb::arg("index") = "radix",
           nb::arg("policy") = "lru", nb::arg("hash") = "fold64", nb::arg("secret").none() = nb::none(),
           nb::arg("thrash_window").none() = nb::none(), nb::arg("sharing") = "isolated", nb::arg("k") = 2,
           nb::arg("pin_budget").none() = nb::none(), nb::arg("manual_clock") = false)
      .def("match",
           [](PyCache& self, nb::handle tokens, const std::string& space, const std::string& tenant, nb::handle content) {
             PromptArgument prompt(tokens, space, tenant, content);
             return call(self, prompt, [&](PrefixCache& cache) { return cache.match(*prompt); });
           },
           nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(), nb::arg("tenant") = "",
           nb::arg("content").none() = nb::none(),
           "The longest cached prefix of `tokens`, at most len(tokens) - 1. Pins and touches nothing.")
      .def("count_cached", &count_cached, nb::arg("prompts"), nb::arg("namespace") = "", nb::kw_only(),
           nb::arg("tenant") = "",
           "How many tokens match() would find, for each of several prompts, in one call: for ordering a queue.")
      .def("explain",
           [](PyCache& self, nb::handle tokens, const std::string& space, const std::string& tenant, nb::handle content) {
             PromptArgument prompt(tokens, space, tenant, content);
             return call(self, prompt, [&](PrefixCache& cache) { return cache.explain(*prompt); });
           },
           nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(), nb::arg("tenant") = "",
           nb::arg("content").none() = nb::none(),
           "Why match() finds no more than it does. For the operator: it looks across namespaces and tenants.")
      .def("begin", &begin<&PrefixCache::begin>, nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(),
           nb::arg("tenant") = "", nb::arg("content").none() = nb::none(), nb::arg("hints").none() = nb::none(),
           "Starts a request: matches and pins the longest cached prefix, atomically.")
      .def("resume", &begin<&PrefixCache::resume>, nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(),
           nb::arg("tenant") = "", nb::arg("content").none() = nb::none(), nb::arg("hints").none() = nb::none(),
           "begin() for a request that goes on after a preemption: its look-up does not count as a hit or a miss.")
      .def("pin",
           [](PyCache& self, nb::handle tokens, const std::string& space, const std::string& tenant, nb::handle content) {
             PromptArgument prompt(tokens, space, tenant, content);
             PySequence pin(self.shared);
             call(self, prompt, [&](PrefixCache& cache) { cache.pin(*pin.state, *prompt); });
             return PyPin{std::move(pin)};
           },
           nb::arg("tokens"), nb::arg("namespace") = "", nb::kw_only(), nb::arg("tenant") = "",
           nb::arg("content").none() = nb::none(),
           "Keeps what is cached of `tokens`, in whole blocks, until the pin is released. Raises OutOfBlocks beyond "
           "the pin budget.")
      .def("register_public",
           [](PyCache& self, nb::handle tokens, const std::string& space) {
             PromptArgument prompt(tokens, space, "", nb::none());
             call(self, prompt, [&](PrefixCache& cache) { cache.register_public(*prompt); });
           },
           nb::arg("tokens"), nb::arg("namespace") = "",
           "With sharing='public': all tenants of the namespace may share these tokens.")
      .def("resize",
           [](PyCache& self, std::int64_t num_blocks) {
             const std::uint32_t count = to_option(num_blocks, "num_blocks", 1, kMaxBlocks);
             return self.shared->locked_without_gil([&](PrefixCache& cache) { return cache.resize(count); });
           },
           nb::arg("num_blocks"),
           "Makes the pool larger or smaller while in use, evicting if it must; OutOfBlocks if too much is pinned.\n\n"
           "Returns the block copies to execute before any later KV write, and before the KV tensors are cut.")
      .def("compact",
           [](PyCache& self) {
             return self.shared->locked_without_gil([](PrefixCache& cache) { return cache.compact(); });
           },
           "Moves blocks down so that the free ones lie together at the end; returns the block copies to execute.")
      .def("save",
           [](PyCache& self) {
             const std::string file = self.shared->locked_without_gil([](PrefixCache& cache) { return cache.save(); });
             return nb::bytes(file.data(), file.size());
           },
           "The index as bytes, without KV: for tiers, and for whoever has to start again.")
      .def("load",
           [](PyCache& self, nb::bytes file) {
             const std::string_view bytes(file.c_str(), file.size());
             self.shared->locked_without_gil([&](PrefixCache& cache) { cache.load(bytes); });
           },
           nb::arg("file"),
           "Takes over a saved index, block numbers and order of eviction (LRU) included, into an empty cache of the same "
           "block size, index and sharing policy. A file that is truncated, damaged or foreign raises ValueError, and "
           "nothing of it is taken.")
      .def("enable_events",
           [](PyCache& self, std::int64_t max_blocks) {
             const std::uint32_t count = to_option(max_blocks, "max_blocks", 1, kMaxBlocks);
             self.shared->locked([&](PrefixCache& cache) { cache.enable_events(count); });
           },
           nb::arg("max_blocks") = 1 << 20, "Collects changes for take_events().")
      .def("take_events", &take_events,
           "The changes since the last call: ('stored', hashes, parent or None, tokens, namespace), ('removed', hashes), "
           "('cleared',).")
      .def("append_and_allocate",
           [](PyCache& self, nb::list sequences, nb::object tokens) {
             TokenArgument ids(tokens);
             std::vector<Sequence*> states = states_of(self, sequences);
             if (states.size() != ids.size()) {
               throw std::invalid_argument("got " + std::to_string(states.size()) + " sequences but " +
                                           std::to_string(ids.size()) + " tokens");
             }
             return self.shared->locked(
                 [&](PrefixCache& cache) { return cache.append_and_allocate(states, ids.data()); });
           },
           nb::arg("sequences"), nb::arg("tokens"),
           "For each running sequence one generated token and the slot it needs, in one call: all of them, or "
           "OutOfBlocks and no change. Returns the block copies to execute.")
      .def("commit_all",
           [](PyCache& self, nb::list sequences) {
             std::vector<Sequence*> states = states_of(self, sequences);
             self.shared->locked([&](PrefixCache& cache) { cache.commit_all(states); });
           },
           nb::arg("sequences"), "Commits every token of these sequences, in one call.")
      .def("clear",
           [](PyCache& self) { self.shared->locked_without_gil([](PrefixCache& cache) { cache.clear(); }); },
           "Evicts all that is not pinned.")
      .def_prop_ro("num_blocks", counter(&PrefixCache::num_blocks))
      .def_prop_ro("block_size", counter(&PrefixCache::block_size))
      .def_prop_ro("num_free_blocks", counter(&PrefixCache::num_free))
      .def_prop_ro("num_cached_blocks", counter(&PrefixCache::num_cached), "Evictable blocks of the tree.")
      .def_prop_ro("num_pinned_blocks", counter(&PrefixCache::num_pinned), "Blocks of running requests.")
      .def_prop_ro("num_available_blocks", counter(&PrefixCache::num_available), "Free and evictable blocks.")
      .def_prop_ro("num_nodes", counter(&PrefixCache::num_nodes), "Nodes of the tree, one a namespace included.")
      .def_prop_ro("num_bytes", counter(&PrefixCache::bytes), "Memory held for the blocks in use, all counted.")
      .def("stats",
           [](PyCache& self, std::optional<std::string> space) {
             return self.shared->locked([&](PrefixCache& cache) { return space ? cache.stats(*space) : cache.stats(); });
           },
           nb::arg("namespace").none() = nb::none(), "Counters of one namespace since it was last forgotten, see namespaces(); or of all together since the start.")
      .def("occupancy",
           [](PyCache& self, std::optional<std::string> space) {
             return self.shared->locked(
                 [&](PrefixCache& cache) { return space ? cache.occupancy(*space) : cache.occupancy(); });
           },
           nb::arg("namespace").none() = nb::none(),
           "What lies in the pool of one namespace, or of all together. Walks the tree.")
      .def("namespaces",
           [](PyCache& self) { return self.shared->locked([](PrefixCache& cache) { return cache.spaces(); }); },
           "The namespaces in use, and those seen of late. Beyond some hundreds, one without a block, a request, a pin and "
           "a registered prefix is forgotten: its counters live on in the sum of all.")
      .def("set_time",
           [](PyCache& self, double seconds) {
             self.shared->locked([&](PrefixCache& cache) { cache.set_time(seconds); });
           },
           nb::arg("seconds"), "Sets the clock that policies see; only kept with manual_clock=True.")
      .def("check_invariants",
           [](PyCache& self) { self.shared->locked([](PrefixCache& cache) { cache.check_invariants(); }); },
           "Raises RuntimeError if the cache contradicts itself. Walks everything: for tests and idle times.")
      .def("dump",
           [](PyCache& self) { return self.shared->locked([](PrefixCache& cache) { return cache.dump(); }); },
           "The tree as text, one line a node.");
}

}  // namespace caudex
