/* Of a library that has only another name, by which programs look for the driver (libcuda.so): what they find in it is in the guard's
 * library, which it needs. */
typedef int nothing;
