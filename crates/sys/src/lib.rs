//! Safe wrappers around the few Linux calls Jiffy needs.
