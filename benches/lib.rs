//! The benchmarks of this package measure what lunbd costs in user space.
