//! Images of fixed-size chunks: RAM and disks, written once, read at random.
