//! Damaged images that pass their checksums, for fuzzing.
