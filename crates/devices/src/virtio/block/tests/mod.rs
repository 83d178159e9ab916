//! The tests play the driver over real rings; the disk is a real file.

mod driver;
mod large;
mod malformed;
mod on_demand;
mod opening;
mod properties;
mod requests;
mod saving;
