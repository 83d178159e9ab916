//! Fields that are `null`.

use serde::{Deserialize, Deserializer};

/// Reads `null`, which Go writes for empty lists and maps, as the empty value; for serde's
/// `deserialize_with`.
///
/// # Errors
///
/// If the value is neither `null` nor a `T`.
pub fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}
