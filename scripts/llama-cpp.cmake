# Read by llama.cpp's project() as llama-cpp-python is built; the Makefile says so in CMAKE_ARGS.
# The library that its command-line tools share: more than half of all there is to compile, and nothing here links it.
# llama-cpp-python switches it on in CMake's cache, so that an option cannot switch it off; a variable comes first.
set(LLAMA_BUILD_COMMON OFF)
