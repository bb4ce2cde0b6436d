//! The kernel's own minimum of uevents, measured per kernel series.
