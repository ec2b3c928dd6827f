#ifndef OPTSTATE_KERNELS_RULES_RULES_H_
#define OPTSTATE_KERNELS_RULES_RULES_H_

// The optimizers whose update of an element needs nothing but that element: for
// each, its kind and its rule's name. The rule `Sgd` has the file sgd-inl.h,
// with
//
//   template <class Visit>
//   decltype(auto) VisitSgd(OptimizerKind kind, uint32_t options,
//                           const Visit& visit);
//
// which returns visit.operator()<Rule>() with the class of these options. The
// values are enumerators and bits that exist.
#define OPTSTATE_RULES(RULE) \
  RULE(kAdam, Adam)          \
  RULE(kAdamW, Adam)         \
  RULE(kSgd, Sgd)            \
  RULE(kAdagrad, Adagrad)    \
  RULE(kRmsprop, Rmsprop)    \
  RULE(kLion, Lion)          \
  RULE(kNadam, Nadam)        \
  RULE(kRadam, Radam)

#endif  // OPTSTATE_KERNELS_RULES_RULES_H_
