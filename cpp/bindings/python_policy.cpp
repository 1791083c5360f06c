#include "python_policy.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "cache/policies/lru.hpp"

namespace nb = nanobind;

namespace caudex {
namespace {

// What a Python policy may ask about nodes. Outlives its cache, and then raises.
struct NodeView {
  const NodeStore* nodes = nullptr;
  const BlockPool* pool = nullptr;
  const double* now = nullptr;

  const Node& at(NodeId id) const {
    if (nodes == nullptr) throw std::runtime_error("the cache of this policy has gone");
    if (id == kNoNode || id >= nodes->capacity()) throw nb::index_error("there is no such node");
    return (*nodes)[id];
  }
};

// Hands every verb to a Python object. Python may fail at any point, and the cache must not: errors are reported as
// unraisable, and a victim that is none is replaced by the least recently used one, for which an LRU list is kept along.
class PythonPolicy final : public Policy {
 public:
  PythonPolicy(PolicyContext context, std::shared_ptr<nb::object> policy)
      : Policy(context), policy_(std::move(policy)), lru_(context), view_(std::make_shared<NodeView>()) {
    *view_ = {&context.nodes, &context.pool, &context.now};
    nb::gil_scoped_acquire acquire;
    nb::setattr(*policy_, "nodes", nb::cast(view_));
  }
  ~PythonPolicy() override { *view_ = NodeView{}; }

  void end_request(const Request& request) override {
    call("end_request", [&] {
      nb::list path;
      for (NodeId id = request.leaf; !nodes[id].is_root(); id = nodes[id].parent) path.append(id);
      policy_->attr("end_request")(request, path);
    });
  }

  void offer(NodeId node) override {
    lru_.offer(node);
    call("offer", [&] { policy_->attr("offer")(node); });
  }

  void withdraw(NodeId node) override {
    lru_.withdraw(node);
    call("withdraw", [&] { policy_->attr("withdraw")(node); });
  }

  void split(NodeId upper, NodeId lower) override {
    lru_.split(upper, lower);
    call("split", [&] { policy_->attr("split")(upper, lower); });
  }

  bool merge(NodeId upper, NodeId lower) override {
    bool agreed = false;
    call("merge", [&] { agreed = nb::cast<bool>(policy_->attr("merge")(upper, lower)); });
    return agreed;
  }

  Victim victim(std::uint32_t) override {
    NodeId chosen = kNoNode;
    call("victim", [&] {
      chosen = nb::cast<NodeId>(policy_->attr("victim")());
      if (is_victim(chosen)) return;
      throw nb::value_error(("node " + std::to_string(chosen) + " is no unpinned leaf").c_str());
    });
    return is_victim(chosen) ? Victim{chosen} : lru_.victim(1);
  }

 private:
  bool is_victim(NodeId id) const {
    return id != kNoNode && id < nodes.capacity() && nodes[id].is_leaf() && !nodes[id].is_pinned() &&
           !nodes[id].blocks.empty();
  }

  template <typename Call>
  void call(const char* verb, Call run) {
    nb::gil_scoped_acquire acquire;
    if (policy_->is_none()) return;  // the garbage collector has taken it
    try {
      run();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable(verb);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
      PyErr_WriteUnraisable(policy_->ptr());
    }
  }

  std::shared_ptr<nb::object> policy_;
  LruPolicy lru_;
  std::shared_ptr<NodeView> view_;
};

}  // namespace

std::shared_ptr<nb::object> set_policy(CacheOptions& options, nb::handle policy) {
  if (nb::isinstance<nb::str>(policy)) {
    options.policy = nb::cast<std::string>(policy);
    return nullptr;
  }
  for (const char* verb : {"end_request", "offer", "withdraw", "split", "merge", "victim"}) {
    if (nb::hasattr(policy, verb)) continue;
    throw nb::type_error(("policy must be a name or an object with the six verbs, and has no " + std::string(verb) + "()")
                             .c_str());
  }
  // Options are copied by threads that do not hold the GIL, so the reference is counted in C++.
  std::shared_ptr<nb::object> held(new nb::object(nb::borrow(policy)), [](nb::object* object) {
    nb::gil_scoped_acquire acquire;
    delete object;
  });
  options.policy = nb::cast<std::string>(nb::handle(policy.type()).attr("__name__"));
  options.policy_factory = [held](PolicyContext context) { return std::make_unique<PythonPolicy>(context, held); };
  return held;
}

void bind_policy(nb::module_& m) {
  nb::class_<NodeView>(m, "NodeView", "What a policy may ask about the nodes of its cache.")
      .def("is_leaf", [](const NodeView& self, NodeId id) { return self.at(id).is_leaf(); }, nb::arg("node"))
      .def("is_pinned", [](const NodeView& self, NodeId id) { return self.at(id).is_pinned(); }, nb::arg("node"))
      .def("parent", [](const NodeView& self, NodeId id) { return self.at(id).parent; }, nb::arg("node"))
      .def("children",
           [](const NodeView& self, NodeId id) {
             nb::list children;
             for (NodeId c = self.at(id).first_child; c != kNoNode; c = self.at(c).next_sibling) children.append(c);
             return children;
           },
           nb::arg("node"), "Those that build on it, pinned or not, in no order.")
      .def("start", [](const NodeView& self, NodeId id) { return self.at(id).start; }, nb::arg("node"),
           "Tokens before it.")
      .def("end", [](const NodeView& self, NodeId id) { return self.at(id).end; }, nb::arg("node"),
           "Tokens up to its end.")
      .def("num_blocks", [](const NodeView& self, NodeId id) { return self.at(id).blocks.size(); }, nb::arg("node"))
      .def("fingerprint",
           [](const NodeView& self, NodeId id) {
             const Node& node = self.at(id);
             if (node.blocks.empty()) throw std::invalid_argument("the node holds no block");
             return self.pool->fingerprint(node.blocks.back());
           },
           nb::arg("node"), "64 bits that name its last block and all before it; meaningful when the block is full.")
      .def("fingerprints",
           [](const NodeView& self, NodeId id) {
             const Node& node = self.at(id);
             const Position size = self.pool->block_size();
             nb::list fingerprints;
             for (std::uint32_t i = 0; i < node.end / size - node.start / size; ++i) {
               fingerprints.append(self.pool->fingerprint(node.blocks[i]));
             }
             return fingerprints;
           },
           nb::arg("node"), "The same of each of its full blocks, from the root's side: to recall what was evicted.")
      .def_prop_ro("now", [](const NodeView& self) { return self.now == nullptr ? 0.0 : *self.now; },
                   "Seconds on the cache's clock.");
  nb::class_<Request>(m, "EndedRequest", "A request, as it looks to a policy when it ends.")
      .def_ro("serial", &Request::serial)
      .def_ro("begin_time", &Request::begin_time)
      .def_ro("end_time", &Request::end_time)
      .def_ro("num_prompt_tokens", &Request::num_prompt_tokens)
      .def_ro("num_cached_tokens", &Request::num_cached_tokens)
      .def_ro("num_tokens", &Request::num_tokens)
      .def_ro("num_output_tokens", &Request::num_output_tokens)
      .def_ro("hints", &Request::hints);
}

}  // namespace caudex
