"""The doctor: reads run directories only. Catalog of failures as data, alarms while a run trains, and a diagnosis afterwards."""
